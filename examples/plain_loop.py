"""Packed training in a loop of your own: pack, install the attention, step. No configuration, no
recipe.

    python examples/plain_loop.py            (a tiny Llama from scratch, on a CPU, in seconds)

Take AutoModelForCausalLM.from_pretrained(...) for `make_model`, and your chats and tokenizer for
`make_rows`.
"""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from automodel_lite import (
    Packer,
    install_attention,
    packed_sequence_thd_collater,
    to_thd,
    tokenize_chats,
)
from automodel_lite.data.tokens.token_rows import TokenizedDocuments
from automodel_lite.data.tokens.tokenizer import train_bpe_tokenizer
from automodel_lite.parts.datasets.toy_chat import ToyChat


def make_model(vocab_size: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    return LlamaForCausalLM(config)


def make_rows() -> tuple[PreTrainedTokenizerFast, TokenizedDocuments]:
    data = ToyChat(num_chats=200)
    tokenizer = train_bpe_tokenizer(data)
    return tokenizer, tokenize_chats(
        [data.train[i]["messages"] for i in range(len(data.train))], tokenizer
    )


def main(num_steps: int = 20) -> list[float]:
    """The loss of each step: mean over the step's label tokens."""
    tokenizer, rows = make_rows()
    packer = Packer(packed_sequence_size=256)
    packs = packer.packs(rows)
    loader = DataLoader(packs, batch_size=2, shuffle=True, collate_fn=packed_sequence_thd_collater)

    model = make_model(len(tokenizer))
    print("attention:", install_attention(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses: list[float] = []
    while len(losses) < num_steps:
        for batch in loader:
            thd = to_thd(batch).to(model.device)
            logits = model(**thd.model_inputs()).logits[0]
            # the labels are next-token aligned: labels[i] is the target of position i, nothing is
            # shifted here
            loss_sum = torch.nn.functional.cross_entropy(
                logits.float(), thd.labels, reduction="sum"
            )
            (loss_sum / thd.num_label_tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss_sum.item() / thd.num_label_tokens)
            if len(losses) == num_steps:
                break
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {num_steps} steps")
    return losses


if __name__ == "__main__":
    main()
