"""Balanced data ordering in fine-tuning with TRL's SFTTrainer and adapters (PEFT), in one process or on many.

    python examples/with_trl.py [--resume]
    torchrun --nproc-per-node=2 examples/with_trl.py [--resume]

The lines marked `cdgrab` are all it takes. With packing, packed sequences are ordered.
"""

from __future__ import annotations

import argparse

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from cdgrab.integrations.transformers import BalancedOrder  # cdgrab


def main() -> None:
    """Fine-tune for a few epochs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="results/trl")
    parser.add_argument("--resume", action="store_true", help="go on from step 30")
    options = parser.parse_args()
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w2")
    texts = [" ".join(f"w{(3 + k * j) % 64}" for j in range(4 + k % 5)) for k in range(96)]
    torch.manual_seed(0)  # the same model on every rank
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2))
    arguments = SFTConfig(
        output_dir=options.folder,
        num_train_epochs=4,
        per_device_train_batch_size=4,
        learning_rate=0.01,
        logging_steps=3,
        save_steps=30,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = SFTTrainer(
        model,
        arguments,
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokenizer,
        peft_config=LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True),
        callbacks=[BalancedOrder()],  # cdgrab
    )
    trainer.train(resume_from_checkpoint=f"{options.folder}/checkpoint-30" if options.resume else None)
    for logged in trainer.state.log_history:
        if "cdgrab/imbalance" in logged and trainer.is_world_process_zero():
            print(f"epoch {logged['epoch']:.0f}: loss {logged['loss']:.6f}, imbalance {logged['cdgrab/imbalance']:.4f}")


if __name__ == "__main__":
    main()
