"""Screens and logs without secrets."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from automodel_lite.cli import compose_config
from automodel_lite.config.check import check_config
from automodel_lite.redact import ScrubbedStream, scrub, secrets
from automodel_lite.run.folder import plain


def test_a_screen_that_takes_nothing_more_ends_no_run() -> None:
    screen = ScrubbedStream(open("/dev/full", "w"))  # noqa: SIM115
    for _ in range(3):
        print("x" * 100_000, file=screen, flush=True)


ROOT = Path(__file__).resolve().parents[1]


def test_secrets_are_found_by_value() -> None:
    environment = {
        "HF_TOKEN": "hf_abcdef",
        "WANDB_API_KEY": "0123456789",
        "TOKENIZERS_PARALLELISM": "false",
    }
    environment |= {"SSL_KEY_FILE": str(ROOT / "pyproject.toml"), "HOME": "/home/abc"}
    assert secrets(environment) == {"hf_abcdef": "HF_TOKEN", "0123456789": "WANDB_API_KEY"}


@pytest.mark.parametrize(
    "name",
    [
        "DB_PWD",
        "GITHUB_PAT",
        "AUTH_HEADER",
        "SLACK_WEBHOOK",
        "SLACK_WEBHOOK_URL",
        "GPG_PASSPHRASE",
        "DB_PASS",
        "MYSQLPWD",
        "JWT",
        "SENTRY_DSN",
        "SESSION_COOKIE",
        "AZURE_SAS",
        "HTTP_AUTHORIZATION",
        "api_key",
        "AZURE_CONNECTION_STRING",
    ],
)
def test_names_that_tell_of_a_secret(name: str) -> None:
    assert secrets({name: "hunter2345"}) == {"hunter2345": name}


@pytest.mark.parametrize(
    "name", ["PATH", "LD_LIBRARY_PATH", "PWD", "OLDPWD", "GIT_AUTHOR_NAME", "XAUTHORITY", "COMPASS"]
)
def test_names_that_do_not(name: str) -> None:
    assert secrets({name: "/home/me/gone"}) == {}


def test_the_password_of_an_address_is_a_secret() -> None:
    assert secrets({"DATABASE_URL": "postgres://me:hunter2@db/x"}) == {"hunter2": "DATABASE_URL"}


HARD = "ü\"quo\\te's\nand a line"


def test_a_secret_is_found_in_every_spelling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DB_PWD", HARD)
    in_json = json.dumps({"a": HARD})
    for text in (
        HARD,
        in_json,
        json.dumps({"a": HARD}, ensure_ascii=False),
        json.dumps({"b": in_json}),
        repr(HARD),
    ):
        assert "DB_PWD" in scrub(text), text
        assert "quo" not in scrub(text), text
    assert scrub(" ".join(HARD.split())) == "<DB_PWD>"


def test_names_of_the_program_stay_in_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that calls `optimizer` a key must not make a config.yaml that no program can read."""
    config = check_config(compose_config("smoke", ["tokenize.template_kwargs.a=an assistant"]))
    for number, value in enumerate(
        ("assistant", "optimizer", "torch.optim", config.optimizer["_target_"], "cosine")
    ):
        monkeypatch.setenv(f"SORT_KEY_{number}", value)
    values = plain(config)
    assert values["tokenize"] == {
        **asdict(config.tokenize),
        "template_kwargs": {"a": "an <SORT_KEY_0>"},
    }
    assert values["optimizer"] == config.optimizer
    assert values.keys() == asdict(config).keys()


def test_credentials_in_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_PASSWORD", "swordfish")
    assert scrub("from https://me:hunter2@host/x with swordfish") == (
        "from https://<credentials>@host/x with <MY_PASSWORD>"
    )
    assert scrub("max_tokens=5 tokenizer=abc") == "max_tokens=5 tokenizer=abc"
