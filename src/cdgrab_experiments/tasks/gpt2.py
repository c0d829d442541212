"""WikiText with a tiny GPT-2: two layers, two heads, width 128, blocks of 128 tokens.

WikiText-103 as in the paper if it is there, else WikiText-2. Tokens come from a byte-level BPE trained on the training
text, because GPT-2's own vocabulary would have to be fetched; with the same size, 50,257, the model has the paper's
6,846,080 parameters. A pair of symbols that occurs once makes no token, so that WikiText-2 gives fewer. Finding the
tokens takes a while, so they are kept in the data folder.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdgrab_experiments import data
from cdgrab_experiments.tasks.base import Problem, Settings, Task
from cdgrab_experiments.tasks.tools import device_of, seeded

BLOCK = 128
VOCABULARY = 50_257
END_OF_TEXT = "<|endoftext|>"


class TinyGPT2(nn.Module):
    """GPT-2 as `transformers` has it, with two changes that leave the function as it is.

    Its `Conv1D` layers become the `Linear` layers they are (weights transposed), whose gradients of single examples
    follow from inputs and outputs. Positions are given for each example, for the same reason, and so is the causal
    mask, because finding out whether one is needed would make a GPU wait. Dropout is off, as in the paper.
    """

    positions: Tensor
    causal: Tensor

    def __init__(self, num_tokens: int, seed: int, **changes: Any) -> None:
        super().__init__()
        transformers: Any = importlib.import_module("transformers")  # heavy, and without types worth checking
        shape = {"n_layer": 2, "n_head": 2, "n_embd": 128, "n_positions": BLOCK} | changes
        config = transformers.GPT2Config(
            vocab_size=num_tokens,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
            attn_implementation="sdpa",
            **shape,
        )
        with seeded(seed):
            self.gpt2 = with_linear_layers(transformers.GPT2LMHeadModel(config))
        length = shape["n_positions"]
        self.register_buffer("positions", torch.arange(length)[None], persistent=False)
        self.register_buffer("causal", torch.ones(1, 1, length, length, dtype=torch.bool).tril(), persistent=False)

    def forward(self, tokens_NT: Tensor) -> Tensor:
        """Scores of the next token at every position."""
        num, length = tokens_NT.shape
        scores: Tensor = self.gpt2(
            input_ids=tokens_NT,
            position_ids=self.positions[:, :length].expand(num, -1),
            attention_mask=self.causal[:, :, :length, :length].expand(num, -1, -1, -1),
        ).logits
        return scores


def with_linear_layers(model: Any) -> Any:
    """Put a `Linear` in the place of every `Conv1D` of `transformers`."""
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "Conv1D":
            layer = nn.Linear(*module.weight.shape)
            layer.weight = nn.Parameter(module.weight.detach().T.contiguous())
            layer.bias = module.bias
            parent, _, key = name.rpartition(".")
            setattr(model.get_submodule(parent), key, layer)
    return model


def loss(model: nn.Module, tokens_NT: Tensor) -> Tensor:
    """Mean over the tokens that have one before them; blocks are of equal length, so it is the mean over them too."""
    # The last score of a block has no answer. To cut it off would copy all the others, which are most of the memory.
    answers_NT = F.pad(tokens_NT[:, 1:], (0, 1), value=-100)
    return F.cross_entropy(model(tokens_NT).flatten(0, 1), answers_NT.flatten(), ignore_index=-100)


def perplexity(model: nn.Module, tokens: Tensor, block: int = BLOCK, batch: int = 16) -> float:
    """Exponential of the mean loss over all tokens but the first of every block; the last, shorter block counts too."""
    device, total, count = device_of(model), 0.0, 0
    whole = len(tokens) // block * block
    parts = [*tokens[:whole].view(-1, block).split(batch), tokens[whole:][None]]
    with torch.no_grad():
        for part in parts:
            predicted = part[:, 1:].numel()
            if predicted:
                total += float(loss(model, part.to(device))) * predicted
                count += predicted
    return math.exp(min(total / count, 700.0))


def load(folder: Path, variant: str, seed: int) -> Problem:  # noqa: ARG001
    """Examples are consecutive blocks of 128 tokens; what is left at the end of the training text is not used."""
    found = data.find_first(TASK.needs, folder)
    train, valid, num_tokens = tokenised(found, folder)
    if len(train) < BLOCK or len(valid) < 2:
        raise found.damaged("wiki.train.tokens", f"gives {len(train):,} tokens, which is not even a block of {BLOCK}")
    blocks = train[: len(train) // BLOCK * BLOCK].view(-1, BLOCK)

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"perplexity": perplexity(model, valid)}

    note = "" if found.set.name == "wikitext-103" else " (the paper has WikiText-103)"
    return Problem(
        model=TinyGPT2(num_tokens, seed),
        train=(blocks,),
        loss=loss,
        evaluate=evaluate,
        metric="perplexity",
        higher_is_better=False,
        data=f"{found.set.title}{note}: {len(blocks):,} blocks of {BLOCK} tokens, {len(valid):,} tokens of validation, "
        f"byte-level BPE of {num_tokens:,}{found.note}",
    )


def tokenised(found: data.Found, folder: Path) -> tuple[Tensor, Tensor, int]:
    """Tokens of training and validation, and how many different ones there can be."""
    texts = {split: found.read(f"wiki.{split}.tokens") for split in ("train", "valid")}
    digest = hashlib.sha256(b"".join(texts.values())).hexdigest()[:16]
    kept = folder / "tokenised" / f"{found.set.name}-bpe-{VOCABULARY}-{digest}.npz"
    if kept.exists():
        try:
            with np.load(io.BytesIO(kept.read_bytes())) as arrays:
                train, valid = (torch.from_numpy(arrays[split].astype(np.int64)) for split in texts)
                return train, valid, int(arrays["num_tokens"])
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            kept.unlink()  # it can be made again
    tokenizers: Any = importlib.import_module("tokenizers")
    plain = {split: found.text(f"wiki.{split}.tokens") for split in texts}
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        plain["train"].splitlines(keepends=True),
        VOCABULARY,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        show_progress=False,
    )
    ids = {split: _encode(tokenizer, text) for split, text in plain.items()}
    num_tokens = tokenizer.get_vocab_size()
    _keep(kept, num_tokens=np.int64(num_tokens), **ids)
    return torch.from_numpy(ids["train"].astype(np.int64)), torch.from_numpy(ids["valid"].astype(np.int64)), num_tokens


def _encode(tokenizer: Any, text: str) -> np.ndarray[Any, np.dtype[np.int32]]:
    lines = text.splitlines(keepends=True)
    return np.concatenate([np.array(line.ids, dtype=np.int32) for line in tokenizer.encode_batch(lines)])


def _keep(path: Path, **arrays: Any) -> None:
    """For the next time; a data folder that cannot be written to is no obstacle."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            np.savez(file, **arrays)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)


TASK = Task(
    name="gpt2",
    title="WikiText, tiny GPT-2",
    settings=Settings(workers=64, batch_size=64, epochs=30, lr=5e-4, optimizer="adamw"),
    load=load,
    needs=("wikitext-103", "wikitext-2"),
    extras=("transformers", "tokenizers"),
)
