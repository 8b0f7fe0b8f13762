"""Draws docs/report.png: the page of the built-in job as a browser shows it.

python docs/draw_report.py            trains the job (a minute), and needs Chromium
python docs/draw_report.py --run runs/llama_packed
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
PICTURE = Path(__file__).with_name("report.png")
WIDTH, HEIGHT = 1200, 640  # the head of the page, the loss and the charts beside it
COLORS = 64
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SETTINGS = ["training.val_every_steps=20", "training.log_every_steps=4"]


def main(argv: list[str] | None = None) -> None:
    """Writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, help="a run's folder (default: trains one)")
    parser.add_argument("--to", type=Path, default=PICTURE)
    args = parser.parse_args(argv)
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"none of {', '.join(BROWSERS)} is installed.")
    with tempfile.TemporaryDirectory() as folder:
        run = args.run or train(Path(folder))
        take_picture(browser, run / "report.html", args.to)


def train(folder: Path) -> Path:
    """Runs the built-in job in an empty folder; returns its run."""
    job = ["--config-name", "llama_packed", "training.num_threads=1", *SETTINGS]
    command = [sys.executable, "-m", "automodel_lite", "train", *job]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "runs" / "llama_packed"


def take_picture(browser: str, page: Path, to: Path) -> None:
    """Opens the page without a screen, and keeps few colors, so that the file is small."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    flags += [f"--window-size={WIDTH},{HEIGHT}", "--virtual-time-budget=3000"]
    subprocess.run(
        [browser, *flags, f"--screenshot={to.resolve()}", page.resolve().as_uri()],
        check=True,
        stderr=subprocess.DEVNULL,
    )
    Image.open(to).convert("RGB").quantize(COLORS).save(to, optimize=True)


if __name__ == "__main__":
    main()
