"""Tiny models of every kind, ours and Hugging Face's, as folders with tokenizers like theirs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tests.evaluation.tiny import made_up_text

SHAPE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 256,
}  # fmt: skip


def byte_level(folder: Path) -> Any:
    """As Qwen's and GPT-2's: bytes, an end of text that is also padding, and nothing that begins a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    end = "<|endoftext|>"
    trainer: Any = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[end], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(made_up_text(), trainer)
    found = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end)
    found.save_pretrained(folder)
    return found


def sentence_pieces(folder: Path) -> Any:
    """As Llama's: texts begin with <s>, words with ▁, and there is no padding."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer: Any = trainers.BpeTrainer(
        vocab_size=450, special_tokens=special, initial_alphabet=["▁", *map(chr, range(33, 127))],
        max_token_length=5, show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(made_up_text(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    found = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    found.save_pretrained(folder)
    return found


def word_pieces(folder: Path) -> Any:
    """As BERT's."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer: Any = trainers.WordPieceTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=list(map(chr, range(33, 127))),
        show_progress=False,
    )
    tokenizer.train_from_iterator(made_up_text(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = dict(zip(("pad", "unk", "cls", "sep", "mask"), special, strict=True))
    found = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{f"{role}_token": token for role, token in names.items()}
    )
    found.save_pretrained(folder)
    return found


def save_llama(folder: Path, **fields: Any) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    size = len(sentence_pieces(folder))
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**SHAPE, "vocab_size": size, **fields})).save_pretrained(folder)
    return folder


def save_qwen(folder: Path, **fields: Any) -> Path:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    size = len(byte_level(folder))
    torch.manual_seed(0)
    shape = {**SHAPE, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": 0, "vocab_size": size}
    Qwen2ForCausalLM(Qwen2Config(**{**shape, **fields})).save_pretrained(folder)
    return folder


def save_gpt2(folder: Path) -> Path:
    """Learned positions, and matrices that are not nn.Linear."""
    from transformers import GPT2Config, GPT2LMHeadModel

    size = len(byte_level(folder))
    torch.manual_seed(0)
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "bos_token_id": 0, "eos_token_id": 0}
    GPT2LMHeadModel(GPT2Config(vocab_size=size, **shape)).save_pretrained(folder)
    return folder


def save_bloom(folder: Path) -> Path:
    """No positions to begin anew: the distance in the row counts."""
    from transformers import BloomConfig, BloomForCausalLM

    size = len(byte_level(folder))
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    BloomForCausalLM(BloomConfig(vocab_size=size, **shape)).save_pretrained(folder)
    return folder


def save_decoder(folder: Path, method: str = "altup") -> Path:
    from altup import AltUpDecoderConfig, AltUpDecoderForCausalLM
    from altup.data import tokenizer as vocabularies

    vocabularies.save(vocabularies.train(made_up_text(), 450), folder)
    size = vocabularies.vocabulary(folder).padded_size
    torch.manual_seed(0)
    shape = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4, "num_layers": 2, "vocab_size": size}
    k = None if method == "dense" else 2
    config = AltUpDecoderConfig.from_preset("tiny", method, k=k, bos_token_id=1, **shape)
    AltUpDecoderForCausalLM(config).save_pretrained(folder)
    return folder


def save_wide(folder: Path, original: Path, method: str = "altup") -> Path:
    import altup
    from altup.core.pretrained import load_config, load_model
    from altup.models.widening.loading import named_class

    config = load_config(original)
    altup.widen(load_model(named_class(config, original), original), method).save_pretrained(folder)
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(original).save_pretrained(folder)
    return folder


def save_bart(folder: Path) -> Path:
    """Texts between <s> and </s>, learned positions, and a decoder that starts with </s>."""
    from transformers import BartConfig, BartForConditionalGeneration

    tokenizer = byte_level(folder)
    tokenizer.add_special_tokens({"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>"})
    start, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A </s>", special_tokens=[("<s>", start), ("</s>", end)]
    )
    tokenizer.save_pretrained(folder)
    shape = {
        f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in (("layers", 2), ("ffn_dim", 64))
    }
    shape |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "d_model": 32}
    tokens = {"bos_token_id": start, "eos_token_id": end, "pad_token_id": tokenizer.pad_token_id}
    tokens |= {"decoder_start_token_id": end, "forced_bos_token_id": start, "forced_eos_token_id": end}
    torch.manual_seed(0)
    config = BartConfig(vocab_size=len(tokenizer), max_position_embeddings=256, **shape, **tokens)
    BartForConditionalGeneration(config).save_pretrained(folder)
    return folder


def save_t5(folder: Path, **fields: Any) -> Path:
    """Hugging Face's, of the first version unless told otherwise, which is not converted to ours."""
    from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration

    from tests.evaluation.tiny import save_tiny

    tokenizer = AutoTokenizer.from_pretrained(save_tiny(folder / "ours"))
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    shape = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4, "num_layers": 2, "decoder_start_token_id": 0}
    config = T5Config(vocab_size=len(tokenizer) + 8, **{**shape, **fields})
    T5ForConditionalGeneration(config).save_pretrained(folder)
    return folder


def save_bert(folder: Path, **fields: Any) -> Path:
    from transformers import BertConfig, BertForMaskedLM

    size = len(word_pieces(folder))
    torch.manual_seed(0)
    BertForMaskedLM(BertConfig(**{**SHAPE, "vocab_size": size, **fields})).save_pretrained(folder)
    return folder


def save_our_bert(folder: Path, method: str = "altup") -> Path:
    from altup import AltUpBertConfig, AltUpBertForMaskedLM
    from altup.data import tokenizer as vocabularies

    vocabularies.save(vocabularies.train(made_up_text(), 450), folder)
    size = vocabularies.vocabulary(folder).padded_size
    torch.manual_seed(0)
    shape = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4, "num_layers": 2, "vocab_size": size}
    config = AltUpBertConfig.from_preset("tiny", method, k=2, max_position_embeddings=256, **shape)
    AltUpBertForMaskedLM(config).save_pretrained(folder)
    return folder


def made_when_asked(makers: dict[str, Callable[[Path], Path]], root: Path) -> Callable[[str], Path]:
    """A model's folder below `root` by its name, made when it is first asked for."""
    made: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in made:
            made[name] = makers[name](root / name.replace(" ", "-"))
        return made[name]

    return find
