#!/usr/bin/env python3
"""Write a model directory without weights for Dynamo's mocker: a llama configuration and a tokenizer trained here.

usage: tiny_model.py TARGET        (build.py runs it; the runtime's tokenizers package must be importable)

The mocker answers with random token ids. A vocabulary of a few hundred would turn them into nothing, so thousands of
word tokens follow the trained ones and every answer is text.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # type: ignore[import-not-found]

CONTEXT_TOKENS = 32768
TRAINED_TOKENS = 1024
WORD_TOKENS = 8000
SEED = 1
BEGIN, END = "<|begin|>", "<|end|>"
SPECIAL = [BEGIN, END, "<|system|>", "<|user|>", "<|assistant|>"]

WORDS = """the a node rail link cache block token page disk host guest engine worker router frontend prompt answer reads
writes moves keeps serves waits starts stops fills empties finds counts first second third cold warm small large both
every another before after while until because and or not over under between into from with without""".split()  # noqa: SIM905

CHAT_TEMPLATE = (
    "{{ '" + BEGIN + "' }}{% for message in messages %}{{ '<|' + message['role'] + '|>' }}{{ message['content'] }}"
    "{{ '" + END + "' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def sentences(count: int) -> list[str]:
    """The training text: ``count`` sentences out of WORDS, the same on every run."""
    source = random.Random(SEED)
    return [" ".join(source.choices(WORDS, k=source.randint(4, 14))).capitalize() + "." for _ in range(count)]


def train() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TRAINED_TOKENS,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences(2000), trainer)
    tokenizer.add_tokens([f" w{number}" for number in range(WORD_TOKENS)])
    return tokenizer


def write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def main() -> None:
    target = Path(sys.argv[1])
    target.mkdir(parents=True)
    tokenizer = train()
    tokenizer.save(str(target / "tokenizer.json"), pretty=False)
    begin, end = (tokenizer.token_to_id(name) for name in (BEGIN, END))
    write_json(
        target / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "bos_token_id": begin,
            "eos_token_id": end,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "max_position_embeddings": CONTEXT_TOKENS,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "vocab_size": tokenizer.get_vocab_size(),
        },
    )
    write_json(target / "generation_config.json", {"bos_token_id": begin, "eos_token_id": end})
    write_json(
        target / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BEGIN,
            "eos_token": END,
            "model_max_length": CONTEXT_TOKENS,
            "chat_template": CHAT_TEMPLATE,
        },
    )


if __name__ == "__main__":
    main()
