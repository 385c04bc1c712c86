"""Data and models of a user of Hugging Face and timm, made up on the spot, found by their dotted names."""

from typing import Any

import numpy as np


def tokenizer() -> Any:
    """Return a tokenizer of the words 1 to 29; 0 pads."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"[PAD]": 0, **{str(number): number for number in range(1, 30)}}
    made = Tokenizer(models.WordLevel(words, unk_token="29"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="29")


def rows(size: int, seed: int = 0) -> Any:
    """Return rows of a Hugging Face data set: tokens of different lengths, and which word of 1, 2, 3 comes first."""
    from datasets import Dataset

    random = np.random.default_rng(seed)
    labels = random.integers(0, 3, size)
    texts = [" ".join(map(str, [label + 1, *random.integers(1, 29, random.integers(1, 12))])) for label in labels]
    return Dataset.from_dict({**tokenizer()(texts), "label": labels.tolist()})


def model(labels: int = 3) -> Any:
    """Return a small BERT without dropout that brings its loss."""
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(**SMALL, num_labels=labels))


SMALL: dict[str, Any] = {
    "vocab_size": 30,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 16,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


class Waves:
    """Sounds, float32 [400], each with a class of three."""

    def __init__(self, size: int, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.sounds = random.standard_normal((size, 400)).astype(np.float32)

    def __len__(self) -> int:
        return len(self.sounds)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_values": self.sounds[index], "labels": index % 3}


def hearing(layerdrop: float) -> Any:
    """Return a small model of sounds whose layers are left out at random."""
    from transformers import HubertConfig, HubertForSequenceClassification

    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    heard = {"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
    placed = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0}
    return HubertForSequenceClassification(
        HubertConfig(**small, **heard, **placed, num_labels=3, layerdrop=layerdrop, hidden_dropout=0.0)
    )
