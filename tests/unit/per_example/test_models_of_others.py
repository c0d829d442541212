"""Models of the transformers and peft packages, made from tiny configurations and attached as they are."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from _models import Catching, source_of
from cdgrab import Ordering
from distributed._ranks import run_ranks

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

NUM, LENGTH, WORDS = 4, 6, 50
TOKENS = torch.randint(0, WORDS, (8 * NUM, LENGTH), generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(8 * NUM) % 3
IMAGES = torch.randn(8 * NUM, 3, 16, 16, generator=torch.Generator().manual_seed(2))
SOUNDS = torch.randn(8 * NUM, 8, 20, generator=torch.Generator().manual_seed(3))
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 40,
}
NO_TOKENS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))


def gpt2() -> Any:
    config = transformers.GPT2Config(vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4, n_positions=32, **NO_TOKENS)
    return transformers.GPT2LMHeadModel(config)


def bert() -> Any:
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, num_labels=3))


def roberta() -> Any:
    return transformers.RobertaForSequenceClassification(transformers.RobertaConfig(**SIZES, num_labels=3))


def distilbert() -> Any:
    config = transformers.DistilBertConfig(vocab_size=WORDS, dim=32, n_layers=2, n_heads=4, hidden_dim=64, num_labels=3)
    return transformers.DistilBertForSequenceClassification(config)


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def causal(name: str, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        config = getattr(transformers, f"{name}Config")(**SIZES, num_key_value_heads=2, **NO_TOKENS, **options)
        return getattr(transformers, f"{name}ForCausalLM")(config)

    return make


def vit() -> Any:
    sizes = {key: size for key, size in SIZES.items() if key not in ("vocab_size", "max_position_embeddings")}
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=3)
    )


def resnet() -> Any:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3
    )
    return transformers.ResNetForImageClassification(config)


def convnext() -> Any:
    config = transformers.ConvNextConfig(
        hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, patch_size=2, num_labels=3, layer_scale_init_value=0.5
    )
    return transformers.ConvNextForImageClassification(config)


def whisper() -> Any:
    config = transformers.WhisperConfig(
        vocab_size=WORDS,
        d_model=32,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=64,
        num_mel_bins=8,
        max_source_positions=10,
        num_labels=3,
        **NO_TOKENS,
    )
    return transformers.WhisperForAudioClassification(config)


def lora(make: Callable[[], Any], *targets: str) -> Callable[[], Any]:
    return lambda: peft.get_peft_model(make(), peft.LoraConfig(r=2, target_modules=list(targets), lora_dropout=0.1))


def of_words(model: nn.Module, index: Tensor) -> Tensor:
    """Of the next words, except for the last ones of every other example: these are padding."""
    targets = TOKENS[index].clone()
    targets[index % 2 == 0, 4:] = -100
    is_t5 = "T5" in type(getattr(model, "module", model)).__name__
    more = {"decoder_input_ids": TOKENS[index]} if is_t5 else {}
    losses = cross_entropy(model(input_ids=TOKENS[index], **more).logits.mT, targets, reduction="none").sum(1)
    return losses / (len(index) * LENGTH)


def of_labels(inputs: Tensor) -> Callable[[nn.Module, Tensor], Tensor]:
    def losses(model: nn.Module, index: Tensor) -> Tensor:
        return cross_entropy(model(inputs[index]).logits, LABELS[index], reduction="none") / len(index)

    return losses


# How it is made, what every example adds to the loss of a batch, and the share of the trained numbers that is balanced.
MODELS: dict[str, tuple[Callable[[], Any], Callable[[nn.Module, Tensor], Tensor], float]] = {
    "GPT-2": (gpt2, of_words, 0.964),
    "BERT": (bert, of_labels(TOKENS), 0.940),
    "RoBERTa": (roberta, of_labels(TOKENS), 1.0),
    "DistilBERT": (distilbert, of_labels(TOKENS), 0.549),
    "T5": (t5, of_words, 0.994),
    "Llama": (causal("Llama"), of_words, 1.0),
    "Qwen2": (causal("Qwen2"), of_words, 1.0),
    "Mistral": (causal("Mistral"), of_words, 1.0),
    "Mixtral": (causal("Mixtral", num_local_experts=4), of_words, 0.161),  # without the experts
    "ViT": (vit, of_labels(IMAGES), 0.970),
    "ConvNeXt": (convnext, of_labels(IMAGES), 0.995),
    "ResNet": (resnet, of_labels(IMAGES), 1.0),
    "Whisper": (whisper, of_labels(SOUNDS), 1.0),
    "LoRA on GPT-2": (lora(gpt2, "c_attn"), of_words, 1.0),
    "LoRA on Llama": (lora(causal("Llama"), "q_proj", "v_proj"), of_words, 1.0),
}


def made(name: str) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft notices how Conv1D is laid out
        torch.manual_seed(0)
        model: nn.Module = MODELS[name][0]()
    return model.train()


@pytest.mark.parametrize("source", ["per_example", "sketch"])
@pytest.mark.parametrize("name", MODELS)
def test_rows_are_what_examples_add_to_the_gradient(name: str, source: str) -> None:
    """Of the parameters that are balanced, with dropout and padding, from the same forward pass."""
    losses, share = MODELS[name][1:]
    model = made(name)
    ordering = Ordering(NUM, batch_size=NUM, unit_size=1, lanes=1)
    catching = Catching(source_of(source, 2**17), lambda rows: rows)
    ordering.attach(model, source=catching)
    parameters = [p for p in model.parameters() if p.requires_grad]
    contributions = losses(model, torch.arange(NUM))
    expected = [torch.autograd.grad(one, parameters, retain_graph=True, allow_unused=True) for one in contributions]
    contributions.sum().backward()
    assert ordering.metrics()["balanced"] == pytest.approx(share, abs=0.0006)
    [rows] = catching.rows
    if name == "ResNet":  # its batch normalisation mixes examples: only their sum is that of the batch
        grads = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
        expected_table = (grads @ grads)[None, None]
        rows = rows.sum(0)[None]
    else:
        left_out = catching.attachment.left_out
        balanced = [name not in left_out for name, p in model.named_parameters() if p.requires_grad]
        flat = torch.stack(
            [
                torch.cat(
                    [
                        torch.zeros(p.numel()) if grad is None or not known else grad.flatten()
                        for grad, p, known in zip(grads, parameters, balanced, strict=True)
                    ]
                )
                for grads in expected
            ]
        )
        expected_table = flat @ flat.T
    torch.testing.assert_close(rows @ rows.T, expected_table, rtol=1e-4, atol=1e-6 * float(expected_table.max()))


def orders(name: str, model: nn.Module, ordering: Ordering) -> list[list[list[int]]]:
    """Of the lanes of this process, after each of two epochs without training."""
    ordering.attach(model, source="sketch", length=128)
    found = []
    for _ in range(2):
        epoch = ordering.epoch
        while ordering.epoch == epoch:
            index = torch.from_numpy(ordering.remaining()[: ordering.batch_size])
            MODELS[name][1](model, index).sum().backward()
        found.append([order.tolist() for order in ordering.orders])
    return found


def on_a_rank(name: str) -> list[list[list[int]]]:
    model = DistributedDataParallel(made(name).eval(), find_unused_parameters=True)
    return orders(name, model, Ordering(8 * NUM, batch_size=NUM // dist.get_world_size(), unit_size=1))


@pytest.mark.parametrize("name", [name for name in MODELS if name != "ResNet"])
def test_two_ranks_find_the_orders_of_one_process(name: str) -> None:
    expected = orders(name, made(name).eval(), Ordering(8 * NUM, batch_size=NUM, unit_size=1))
    ranks = run_ranks(2, on_a_rank, name)
    for epoch in range(2):
        assert [ranks[lane % 2][epoch][lane // 2] for lane in range(NUM)] == expected[epoch]


@pytest.mark.parametrize(
    "make",
    [
        lambda: peft.get_peft_model(
            gpt2(), peft.IA3Config(target_modules=["c_attn", "mlp.c_proj"], feedforward_modules=["mlp.c_proj"])
        ),
        lambda: peft.get_peft_model(gpt2(), peft.LoraConfig(r=2, target_modules=["wte"])),
    ],
    ids=["IA3", "LoRA on embeddings"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_adapters_whose_parameters_no_layer_uses(make: Callable[[], Any]) -> None:
    model = make()
    with pytest.raises(ValueError, match="no trained parameter can be balanced"):
        Ordering(8 * NUM, batch_size=NUM).attach(model, source="sketch")
    ordering = Ordering(8 * NUM, batch_size=NUM)
    ordering.attach(model)
    of_words(model, torch.arange(NUM)).sum().backward()
    assert (ordering.unit_size, ordering.examples_left) == (NUM, 7 * NUM)
