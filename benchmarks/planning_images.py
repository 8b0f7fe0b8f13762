"""Planning of packs with images from their headers: CPU time and memory until every pack is known, in one process.

    OMP_NUM_THREADS=1 python -m benchmarks.planning_images FOLDER [--rows 1000000] [--files 3000]

Draws JPEG files of different sizes and writes chats with an image each, once; then tokenizes, checks and packs them, with
the processor of Qwen3-VL. Nothing is decoded but the images of a few documents that are compared with the whole processor.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import time
from pathlib import Path

from PIL import Image

from tests.images.families import write_model
from tests.images.test_exact import config_of_images, data_of


def write_rows(folder: Path, num_rows: int, num_files: int) -> None:
    rng = random.Random(0)
    (folder / "files").mkdir(parents=True)
    for number in range(num_files):
        size = rng.randrange(56, 1500), rng.randrange(56, 1500)
        color = tuple(rng.randrange(256) for _ in range(3))
        Image.new("RGB", size, color).save(folder / f"files/{number}.jpg", quality=30)
    with (folder / "chats.jsonl").open("w") as lines:
        for row in range(num_rows):
            words = " ".join(
                rng.choices(["red", "two", "cats?", "what", "is"], k=rng.randrange(4, 20))
            )
            picture = {"type": "image", "image": f"files/{row % num_files}.jpg"}
            asked = {"role": "user", "content": [picture, {"type": "text", "text": words}]}
            said = {"role": "assistant", "content": "a dog."}
            lines.write(json.dumps({"messages": [asked, said]}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--files", type=int, default=3000)
    arguments = parser.parse_args()
    folder = arguments.folder
    if not folder.exists():
        write_rows(folder, arguments.rows, arguments.files)
        write_model("qwen3_vl", folder)
    shutil.rmtree(folder / "cache", ignore_errors=True)
    config = config_of_images(
        folder,
        f"cache_dir={folder}/cache",
        "packed_sequence.packed_sequence_size=2048",
        "tokenize.num_proc=1",
    )
    start = time.process_time()
    data = data_of(config)
    packs = data.packs_of(0)
    spent = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    num_rows = data.counts["data/train/num_rows"]
    print(
        f"{num_rows:,} rows with an image of {arguments.files:,} files in {len(packs):,} packs: {spent:,.0f} CPU-s, "
        f"{1e3 * spent / num_rows:.2f} ms per row, at most {peak:,.0f} MiB"
    )


if __name__ == "__main__":
    main()
