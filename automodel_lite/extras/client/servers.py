"""Inference servers that take new weights from a folder: vLLM and SGLang, by their public HTTP
interfaces.

           all weights                             an adapter                   answers
vLLM       /pause, /collective_rpc reload_weights, /v1/load_lora_adapter        /v1/completions
           /reset_prefix_cache, /resume
SGLang     /update_weights_from_disk               /load_lora_adapter           /generate

Prompts and answers are ids: no text is tokenized anywhere. Written against vLLM 0.32 and SGLang
0.5.23.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from automodel_lite.errors import ConfigError
from automodel_lite.extras.client.json_http import Http, Reply
from automodel_lite.extras.client.sampling import Request
from automodel_lite.seed import derive_seed

Kind = Literal["auto", "vllm", "sglang"]
_MOST_CONNECTIONS = 256
_PROBE_TOKENS = 8
_SAME = 0.05  # nats between two computations of one number, in bf16, too


@dataclass(frozen=True)
class Drawn:
    """ids        with what has ended them
    log_probs  of the ids, by the server's arithmetic, before temperature, top_p and top_k
    is_ended   by an end token or a stop, not by its length
    """

    ids: list[int]
    log_probs: list[float]
    is_ended: bool


@dataclass(frozen=True)
class Job:
    """A request, and what ends its answers. ends: of the model's own, where they end an answer."""

    request: Request
    strings: list[str]
    ids: list[int]

    @classmethod
    def of(cls, request: Request, ends: Sequence[int]) -> Job:
        strings, ids = request.stop_parts(ends)
        return cls(request, strings, sorted(ids))

    @property
    def changes_scores(self) -> bool:
        """Is drawn from others than the model's own probabilities?"""
        asked = self.request
        return asked.temperature not in (0.0, 1.0) or asked.top_p < 1 or asked.top_k > 0


@dataclass
class Server(ABC):
    """A server, as it was found. knows_log_probs: what it returns was seen to be the model's own
    numbers, whatever temperature they were drawn at.
    """

    http: Http
    knows_log_probs: bool = False
    kind: ClassVar[str]
    plain_cure: ClassVar[str]

    # ---------------------------------------------- weights
    @abstractmethod
    def load_adapter(self, name: str, folder: str, rank: int) -> None:
        """Adds an adapter; those that are there stay."""

    @abstractmethod
    def unload_adapter(self, name: str) -> None:
        """Drops an adapter; one that is not there any more is no error."""

    @abstractmethod
    def load_all(self, name: str, folder: str) -> None:
        """Replaces all weights, when what is being drawn has ended, and drops cached prefixes."""

    # ---------------------------------------------- answers
    @abstractmethod
    def draw(self, jobs: Sequence[Job], name: str, is_adapter: bool) -> list[list[Drawn]]:
        """Returns the answers of each job, by the weights of a name; raises RuntimeError where the
        server has others.
        """

    def check_log_probs(self, job: Job, name: str, is_adapter: bool) -> None:
        """Raises ConfigError for a server whose log-probabilities are those of the changed scores:
        the likeliest tokens of a prompt have the same numbers at temperature 0 and 2.
        """
        if self.knows_log_probs or not job.changes_scores:
            return
        prompt = job.request.prompt
        probes = [
            Job(Request(prompt, 1, _PROBE_TOKENS, temperature, 1.0, top_k, []), [], [])
            for temperature, top_k in ((0.0, 0), (2.0, 1))
        ]
        plain, changed = (found[0] for found in self.draw(probes, name, is_adapter))
        for token, other, a, b in zip(plain.ids, changed.ids, plain.log_probs, changed.log_probs):
            if token != other:
                break
            if abs(a - b) > _SAME:
                raise ConfigError(
                    f"sampler={self.http.url} returns log-probabilities after temperature, top_p "
                    "and top_k, so they are not the model's own",
                    key="sampler",
                    cure=f"{self.plain_cure}, or draw with temperature=1, top_p=1 and top_k=0",
                )
            # a certain token has the same number at any temperature
            self.knows_log_probs |= a < -2 * _SAME

    def _refused(self, doing: str, reply: Reply, cure: str) -> ConfigError:
        text = f"sampler={self.http.url} does not {doing} ({reply.message()})"
        return ConfigError(text, key="sampler", cure=cure)

    def _failed(self, reply: Reply, name: str) -> Exception:
        """Returns the error of a request for answers."""
        # SGLang refuses a request for an adapter that it lacks, by name, as any wrong request
        if reply.status == 404 or (reply.status == 400 and name in reply.message()):
            return RuntimeError(
                f"sampler={self.http.url} has no {name} any more ({reply.message()}): was it "
                "restarted, or does it hold too few adapters? Call update() again."
            )
        if 400 <= reply.status < 500:
            return ValueError(f"sampler={self.http.url} refuses a prompt: {reply.message()}.")
        return RuntimeError(
            f"sampler={self.http.url} has failed ({reply.status}: {reply.message()}): its own log "
            "has more."
        )


class Vllm(Server):
    kind = "vllm"
    plain_cure = "start it without --logprobs-mode, or with --logprobs-mode raw_logprobs"

    def load_adapter(self, name: str, folder: str, rank: int) -> None:
        reply = self.http.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder})
        start = (
            f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve MODEL --enable-lora --max-lora-rank "
            f"{_rank_of_vllm(rank)} --max-cpu-loras 4"
        )
        if reply.lacks_route:
            raise self._refused("take adapters while it runs", reply, f"start it with `{start}`")
        if not reply.is_ok:
            raise self._refused(
                f"take the adapter {folder}",
                reply,
                f"it must see that folder (folder=, seen_as=) and be started with `{start}`",
            )

    def unload_adapter(self, name: str) -> None:
        self.http.post("/v1/unload_lora_adapter", {"lora_name": name})

    def load_all(self, name: str, folder: str) -> None:
        reply = self.http.post("/pause?mode=wait", {})
        if reply.lacks_route:
            raise self._refused(
                "take weights while it runs",
                reply,
                "start it with `VLLM_SERVER_DEV_MODE=1 vllm serve MODEL`",
            )
        if not reply.is_ok:
            raise self._refused("pause", reply, "its own log says why")
        try:
            call = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
            reply = self.http.post("/collective_rpc", call)
            if not reply.is_ok:
                raise self._refused(
                    f"take the weights {folder}",
                    reply,
                    "it must see that folder (folder=, seen_as=) and serve the same model: its "
                    "own log says which",
                )
            reply = self.http.post("/reset_prefix_cache", {})
            if not reply.is_ok or (reply.value() or {}).get("success") is not True:
                raise self._refused(
                    "drop its prefix cache", reply, "start it with --no-enable-prefix-caching"
                )
            reply = self.http.post("/update_weight_version", {"new_version": name})
            if not reply.is_ok:
                raise self._refused(
                    "number its weights", reply, "it is older than vLLM 0.32: upgrade it"
                )
        finally:
            resumed = self.http.post("/resume", {})
        if not resumed.is_ok:
            raise self._refused("resume", resumed, "its own log says why; restart it")

    def draw(self, jobs: Sequence[Job], name: str, is_adapter: bool) -> list[list[Drawn]]:
        model = name if is_adapter else self._model()

        def ask(job: Job) -> list[Drawn]:
            reply = self.http.post("/v1/completions", self._body(job, model))
            if not reply.is_ok:
                raise self._failed(reply, name)
            choices = sorted(reply.value()["choices"], key=lambda choice: choice["index"])
            if not job.request.temperature:
                choices *= job.request.num_samples
            return [
                _checked(
                    choice.get("token_ids"),
                    (choice.get("logprobs") or {}).get("token_logprobs"),
                    choice["finish_reason"],
                )
                for choice in choices
            ]

        drawn = _at_once(ask, jobs)
        if not is_adapter:
            reply = self.http.get("/weight_info")
            if (found := (reply.value() or {}).get("weight_version")) != name:
                raise _other_weights(self.http.url, name, found)
        return drawn

    def _model(self) -> str:
        """Returns the name of what is served, adapters apart."""
        reply = self.http.get("/v1/models")
        if not reply.is_ok:
            raise self._failed(reply, "/v1/models")
        names = [card["id"] for card in reply.value()["data"] if not card.get("parent")]
        return str(names[0])

    def _body(self, job: Job, model: str) -> dict[str, Any]:
        # everything is named: what is left out is that of the model's generation_config.json
        asked = job.request
        return {
            "model": model,
            "prompt": list(map(int, asked.prompt)),
            # it draws the likeliest tokens once
            "n": asked.num_samples if asked.temperature else 1,
            "max_tokens": asked.max_new_tokens,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "top_k": asked.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": derive_seed(asked.seed, "server"),
            "stop": job.strings,
            "stop_token_ids": job.ids,
            # the end tokens are among the ids, where they end an answer
            "ignore_eos": True,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "logprobs": 0,
            "return_token_ids": True,
        }


class Sglang(Server):
    kind = "sglang"
    plain_cure = "start it with SGLANG_RETURN_ORIGINAL_LOGPROB=1"

    def load_adapter(self, name: str, folder: str, rank: int) -> None:
        reply = self.http.post("/load_lora_adapter", {"lora_name": name, "lora_path": folder})
        if not reply.is_ok:
            raise self._refused(
                f"take the adapter {folder}",
                reply,
                "it must see that folder (folder=, seen_as=) and be started with `--enable-lora "
                f"--max-lora-rank {rank} --lora-target-modules all`, without --dp-size",
            )

    def unload_adapter(self, name: str) -> None:
        self.http.post("/unload_lora_adapter", {"lora_name": name})

    def load_all(self, name: str, folder: str) -> None:
        body = {"model_path": folder, "weight_version": name, "flush_cache": True}
        reply = self.http.post("/update_weights_from_disk", body)
        if not reply.is_ok or not (reply.value() or {}).get("success"):
            raise self._refused(
                f"take the weights {folder}",
                reply,
                "it must see that folder (folder=, seen_as=) and serve the same model: its own "
                "log says which",
            )

    def draw(self, jobs: Sequence[Job], name: str, is_adapter: bool) -> list[list[Drawn]]:
        # an answer each, as the answers of one request would have one seed
        whole = [(job, number) for job in jobs for number in range(job.request.num_samples)]
        body: dict[str, Any] = {
            "input_ids": [list(map(int, job.request.prompt)) for job, _ in whole],
            "sampling_params": [self._settings(job, number) for job, number in whole],
            "return_logprob": True,
        }
        if is_adapter:
            body["lora_path"] = [name] * len(whole)
        reply = self.http.post("/generate", body)
        if not reply.is_ok:
            raise self._failed(reply, name)
        drawn = []
        for answer in reply.value():
            about = answer["meta_info"]
            if not is_adapter and about.get("weight_version") != name:
                raise _other_weights(self.http.url, name, about.get("weight_version"))
            found = about["output_token_logprobs"]
            ids = [token for _, token, *_ in found]
            log_probs = [log_prob for log_prob, *_ in found]
            drawn.append(_checked(ids, log_probs, about["finish_reason"]["type"]))
        answers = iter(drawn)
        return [[next(answers) for _ in range(job.request.num_samples)] for job in jobs]

    def _settings(self, job: Job, number: int) -> dict[str, Any]:
        asked = job.request
        return {
            # everything is named: what is left out is the server's --preferred-sampling-params
            "max_new_tokens": asked.max_new_tokens,
            "min_new_tokens": 0,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "top_k": asked.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            # 31 bits, as kernels take it; used with --enable-deterministic-inference
            "sampling_seed": derive_seed(asked.seed, number, "server") % 2**31,
            "stop": job.strings,
            "stop_token_ids": job.ids,
            # without it the tokenizer's own end token ends an answer, whatever the ids are
            "ignore_eos": not job.ids,
            "no_stop_trim": True,
            "skip_special_tokens": False,
        }


def find_server(http: Http, kind: Kind) -> Server:
    """Returns the server at an address; raises ConfigError for one that is neither."""
    if kind not in ("auto", "vllm", "sglang"):
        raise ConfigError(f"kind={kind}", key="kind", cure="use auto, vllm or sglang")
    if kind == "vllm":
        return Vllm(http)
    if kind == "sglang":
        return Sglang(http)
    try:
        found = http.get("/model_info").value()
    except ConnectionError as error:
        raise ConfigError(str(error), key="sampler") from error
    if isinstance(found, dict) and "model_path" in found:
        return Sglang(http)
    if isinstance(found := http.get("/version").value(), dict) and "version" in found:
        return Vllm(http)
    raise ConfigError(
        f"sampler={http.url} is neither vLLM (/version) nor SGLang (/model_info)",
        key="sampler",
        cure="give the address of the server itself; behind a gateway, kind=vllm or kind=sglang",
    )


def _checked(ids: Any, log_probs: Any, reason: str) -> Drawn:
    """Returns an answer; raises RuntimeError for one that is not whole."""
    if reason not in ("stop", "length"):
        raise RuntimeError(
            f"the server has given an answer up ({reason}): did somebody abort its requests? Draw "
            "again."
        )
    if not ids or log_probs is None or len(ids) != len(log_probs):
        raise RuntimeError(
            "the server has returned no ids with their log-probabilities (return_token_ids of "
            "vLLM, output_token_logprobs of SGLang): upgrade it."
        )
    if not all(log_prob is not None and math.isfinite(log_prob) for log_prob in log_probs):
        raise RuntimeError("the server has returned a log-probability that is no finite number.")
    return Drawn(list(map(int, ids)), list(map(float, log_probs)), reason == "stop")


def _other_weights(url: str, name: str, found: object) -> RuntimeError:
    return RuntimeError(
        f"sampler={url} has drawn by the weights {found}, not {name}: somebody else has updated "
        "it, or it was restarted: call update() again; two trainers need two servers, or adapters."
    )


def _rank_of_vllm(rank: int) -> int:
    """Returns the least --max-lora-rank that vLLM takes for an adapter."""
    return next((size for size in (1, 8, 16, 32, 64, 128, 256, 320, 512) if size >= rank), rank)


def _at_once(ask: Callable[[Job], list[Drawn]], jobs: Sequence[Job]) -> list[list[Drawn]]:
    if len(jobs) == 1:
        return [ask(jobs[0])]
    with ThreadPoolExecutor(min(len(jobs), _MOST_CONNECTIONS)) as pool:
        futures = [pool.submit(ask, job) for job in jobs]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
