"""What a step is made of: loss, optimizer, schedule, order of packs, checkpoints, metrics."""
