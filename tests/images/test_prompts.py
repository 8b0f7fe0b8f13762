"""Prompts with images, which a run answers at each validation."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer

from automodel_lite.errors import ConfigError
from automodel_lite.evaluation.generator import Generator
from automodel_lite.evaluation.questions import questions_of
from automodel_lite.extras.report import pieces_of
from automodel_lite.parts.evaluation.exact_match import ExactMatch, asked_by
from automodel_lite.parts.images import open_images
from automodel_lite.parts.images.sources import ImageSource
from automodel_lite.parts.images.tokens import ImageProcessor
from recipes import export_hf, generate, train_ft
from tests.attention.hybrids import InFloat64
from tests.images.families import draw, write_chats, write_model
from tests.images.test_exact import config_of_images, data_of, packed_model
from tests.runs import config_of
from tests.tiers import only_in_ci


def config_of_prompt(folder: Path, prompt: str) -> object:
    return config_of_images(folder, f"samples.prompts=['{prompt}']")


@pytest.mark.parametrize("family", ["qwen3_vl", *only_in_ci("gemma3", "llava_next")])
def test_an_answer_goes_on_as_plain_transformers_does(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(family, tmp_path)
    write_chats(tmp_path, num=3)
    monkeypatch.chdir(tmp_path)
    prompt = "![](0.png)what is it?![b](1.png)"
    with InFloat64():
        data = data_of(config_of_prompt(tmp_path, prompt))
        model = packed_model(tmp_path, data).eval()
        plain = AutoModelForImageTextToText.from_pretrained(tmp_path, attn_implementation="eager")
        plain = plain.double().eval()
        own = ImageProcessor(str(tmp_path), plain.config).own
        parts = [
            {"type": "image"},
            {"type": "text", "text": "what is it?"},
            {"type": "image"},
        ]
        text = own.tokenizer.apply_chat_template(
            [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
        )
        images = [Image.open(f"{number}.png") for number in range(2)]
        ids, stream = data.packer.prompt(data.job, prompt)
        for said in ("", "yes"):
            inputs = own(text=[text + said], images=images, return_tensors="pt")
            more = own.tokenizer(said, add_special_tokens=False)["input_ids"]
            assert inputs["input_ids"][0].tolist() == ids + more
            with torch.no_grad():
                want = plain(**inputs, use_cache=False).logits[0, -1]
                got = model.logits(stream(ids + more), num_last=1)[-1]
            torch.testing.assert_close(got, want, rtol=0, atol=1e-9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two chats that only their pictures tell apart, one of text, and one whose picture is gone."""
    made = tmp_path_factory.mktemp("questions")
    lines = []
    for row, said in enumerate(["x", "y", "n", "lost"]):
        asked: list[dict[str, str]] = [{"type": "text", "text": "what?"}]
        if row != 2:
            asked.insert(0, {"type": "image", "image": f"{row}.png"})
        if row < 2:
            draw(made / f"{row}.png", 60, 122, seed=row)
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
        lines.append(json.dumps({"messages": messages}))
    (made / "chats.jsonl").write_text("\n".join(lines))
    return write_model("qwen3_vl", made)


LOST = ["dataset.bad_image=drop", "tokenize.max_bad_frac=0.5", "evaluation=exact_match"]


def test_questions_bring_their_images(folder: Path) -> None:
    """Those of the documents, read as a prompt of the same text and image is."""
    data = data_of(config_of_images(folder, *LOST))
    asked = list(questions_of(data.documents))
    assert [question.answer for question in asked] == ["x", "y", "n", "lost"]
    shown = [f"![]({folder}/0.png)what?", f"![]({folder}/1.png)what?", "what?"]
    assert [asked_by(question) for question in asked[:3]] == shown
    model = AutoModelForImageTextToText.from_pretrained(folder)
    generator = Generator(model, data.tokenizer, str(folder), open_images=open_images)
    for question, prompt in zip(asked[:2], shown):
        ids, _ = data.packer.prompt(data.job, prompt)
        inputs = open_images(generator)(question.messages)
        assert inputs["input_ids"][0].tolist() == ids


def test_an_image_of_a_question_is_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = data_of(config_of_images(folder, *LOST))
    model = AutoModelForImageTextToText.from_pretrained(folder)
    generator = Generator(model, data.tokenizer, str(folder), open_images=open_images)
    decoded: list[str] = []
    plain = ImageSource.pixels

    def counted(source: ImageSource, *how: Any) -> Any:
        decoded.append(source.name)
        return plain(source, *how)

    monkeypatch.setattr(ImageSource, "pixels", counted)
    text, row = ExactMatch(max_new_tokens=2).ask(generator, questions_of(data.documents))
    assert sorted(decoded) == ["0.png", "1.png", "3.png"]
    assert (row["answers"], row["answers_refused"]) == (3, 1)
    assert "not asked: question 4" in text
    assert "image 3.png cannot be read" in text


@pytest.mark.system
@pytest.mark.parametrize("mixed", [False, True], ids=["files", "mixture"])
def test_held_out_questions_are_answered_by_what_is_seen(
    mixed: bool, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    how = ["training.max_steps=60", "optimizer.lr=0.01", "training.num_threads=1", *LOST]
    how += [f"output_dir={tmp_path}", "model.train_towers=true", "dataset.bad_image=drop"]
    held_out = folder / "asked.jsonl"
    first, second, *rest = (folder / "chats.jsonl").read_text().splitlines()
    held_out.write_text("\n".join([second, first, *rest]))
    if mixed:
        images = "_target_: automodel_lite.parts.images.dataset.ImageFiles"
        paths = f"path: {folder}/chats.jsonl, val_path: {held_out}"
        one = f"{{dataset: {{{images}, {paths}, bad_image: drop}}}}"
        how = [each for each in how if not each.startswith("dataset.")]
        how += ["dataset=mixture", f"dataset.sources={{one: {one}}}"]
        config = config_of("finetune", tmp_path, "name=x", f"model.pretrained={folder}", *how)
    else:
        config = config_of_images(folder, *how, f"dataset.val_path={held_out}")
    assert train_ft.main(config) == 0
    screen = capsys.readouterr().out
    assert "held-out questions: 3 of 3 exactly right" in screen, screen[-3000:]
    # the question is cut, as its picture's folder may be long
    assert re.search(r"not asked: question 4, .*\(image 3\.png cannot be read", screen)
    asked = tmp_path / "asked.jsonl"
    asked.write_text("\n".join((folder / "chats.jsonl").read_text().splitlines()[:3]))
    for row in range(2):
        (tmp_path / f"{row}.png").write_bytes((folder / f"{row}.png").read_bytes())
    out = tmp_path / "out.jsonl"
    assert generate.main([str(tmp_path), "--prompts", str(asked), "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["generated"] for row in rows] == ["x", "y", "n"]


def test_a_prompt_without_its_image_is_refused_at_the_start(tmp_path: Path) -> None:
    write_model("qwen3_vl", tmp_path)
    write_chats(tmp_path, num=2)
    with pytest.raises(ConfigError, match=r"samples.prompts: image nowhere.png cannot be read"):
        data_of(config_of_prompt(tmp_path, "![](nowhere.png) what?"))


def test_a_prompt_is_shown_with_its_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (400, 300), "red").save("a.png")
    before, image, behind = pieces_of("see ![](a.png) what?")
    assert (before, behind) == (("see ", ""), (" what?", ""))
    assert image[0] == "![](a.png)"
    assert image[1].startswith("data:image/jpeg;base64,")
    assert pieces_of("![](gone.png)")[1] == ("![](gone.png)", "")
    assert pieces_of("what?") == [("what?", "")]


def test_a_run_is_asked_with_images_as_large_as_those_it_was_trained_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = "{_target_: automodel_lite.parts.images.dataset.ImageFiles, max_image_pixels: 3200}"
    (tmp_path / "config.yaml").write_text(f"name: x\ndataset: {dataset}\n")
    (tmp_path / "hf").symlink_to(folder)
    draw(tmp_path / "a.png", 280, 56, seed=0)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "what?", "image": "a.png"}))
    grids = []

    def answers(generator: Generator, chats: Any, **options: Any) -> list[str]:
        grids.append(open_images(generator)(chats[0])["image_grid_thw"].tolist())
        return [""]

    monkeypatch.setattr(Generator, "answers", answers)
    asked = ["what?", "--image", str(tmp_path / "a.png")]
    rows = ["--prompts", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "out.jsonl")]
    assert generate.main([str(folder), *asked]) == 0
    assert generate.main([str(tmp_path), *asked]) == 0
    assert generate.main([str(tmp_path), *rows]) == 0
    assert grids == [[[1, 2, 12]], [[1, 2, 8]], [[1, 2, 8]]]
    # the cures of a dataset are refused here
    with pytest.raises(ConfigError, match=r"gone.png cannot be read \(.*\): name another file\.$"):
        generate.main([str(folder), "what?", "--image", str(tmp_path / "gone.png")])


@pytest.mark.parametrize("peft", ["none", "lora"])
def test_what_is_exported_reads_images_as_the_training_did(
    peft: str, folder: Path, tmp_path: Path
) -> None:
    """By dataset.processor, where that is another one than the model's."""
    draw(tmp_path / "a.png", 114, 114, seed=0)
    other = write_model("qwen3_vl", tmp_path / "other")
    settings = json.loads((other / "preprocessor_config.json").read_text())
    settings["size"]["longest_edge"] = settings["size"]["shortest_edge"]
    (other / "preprocessor_config.json").write_text(json.dumps(settings))
    how = [f"dataset.processor={other}", f"peft={peft}", "dataset.bad_image=drop"]
    how += [f"output_dir={tmp_path}/run", "training.max_steps=1", "tokenize.max_bad_frac=0.5"]
    assert train_ft.main(config_of_images(folder, *how)) == 0
    exported = tmp_path / "run" / ("hf" if peft == "none" else "adapter")
    model = AutoModelForImageTextToText.from_pretrained(folder)
    chat = [{"role": "user", "content": [{"type": "image", "image": str(tmp_path / "a.png")}]}]
    grids = []
    for source in (other, exported, folder):
        tokenizer = AutoTokenizer.from_pretrained(source)
        inputs = open_images(Generator(model, tokenizer, str(source)))(chat)
        grids.append(inputs["image_grid_thw"].tolist())
    assert grids == [[[1, 2, 2]], [[1, 2, 2]], [[1, 4, 4]]]
    if peft == "none":
        return
    assert export_hf.main([str(tmp_path / "run"), "--to", str(tmp_path / "merged")]) == 0
    merged = json.loads((tmp_path / "merged" / "preprocessor_config.json").read_text())
    assert merged["size"] == settings["size"]
