"""What makes a document of a row of each known format (data/reading/formats.yaml)."""
