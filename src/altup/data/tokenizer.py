"""The vocabulary: a SentencePiece-style unigram model trained here, or any existing fast tokenizer.

A trained vocabulary has `vocab_size` pieces (pad 0, eos 1, unk 2, 256 bytes, then words and parts of words) and
above them 100 sentinels counting down: `<extra_id_0>` is the highest id, as in T5. Characters that have no piece
are spelt in bytes, so every text survives `decode(encode(text))` up to
normalisation (NFKC, white space collapsed).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from altup.core.errors import UserError, check_whole, named
from altup.core.files import read_json, sha256_of
from altup.core.hub import find_tokenizer
from altup.core.pretrained import load_tokenizer
from altup.core.tokenizer_trial import try_tokenizer

PAD, EOS, UNK = "<pad>", "</s>", "<unk>"
SENTINELS = [f"<extra_id_{i}>" for i in range(100)]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
COVERAGE = 0.9995  # of the sample's characters get a piece of their own; the others are spelt in bytes
NEVER = -1000.0  # the score of pieces that text must not match: `</s>` written out in a document is no end
PIECES = 32_000  # T5's
CHARACTERS_A_PIECE = 100  # of a text that cannot fill PIECES, so that a piece is seen some dozens of times
OTHERS = 3 + len(BYTES)  # pad, eos, unk and bytes, beside the trained pieces
LEAST_VOCABULARY = 360  # specials, bytes, printable ASCII
MOST_VOCABULARY = 10_000_000
RESTORE = "restore it, or run the same `altup prepare` command again"
PADDED_TO = 128  # embedding rows; 32,100 pieces and sentinels become T5's 32,128


@dataclass(frozen=True)
class Vocabulary:
    """What training needs to know of a tokenizer; kept in the manifest of the shards."""

    sha256: str
    size: int
    pad: int
    eos: int
    start: int | None
    mask: int | None
    sentinels: tuple[int, ...]

    @property
    def padded_size(self) -> int:
        """Rows of the embedding tables: `size` rounded up to a multiple of 128."""
        return -(-self.size // PADDED_TO) * PADDED_TO

    @property
    def seal(self) -> str:
        """A hash of all of it: two vocabularies with one seal make the same batches of the same shards."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "sentinels": list(self.sentinels)}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Vocabulary:
        """ValueError or TypeError where it holds something else."""
        vocabulary = cls(**{**fields, "sentinels": tuple(fields["sentinels"])})
        named = [one for one in (vocabulary.start, vocabulary.mask) if one is not None]
        for one in (vocabulary.size, vocabulary.pad, vocabulary.eos, *named, *vocabulary.sentinels):
            if not isinstance(one, int) or not 0 <= one < 2**31:
                raise ValueError(f"a vocabulary with {one!r} for a token")
        return vocabulary


def _blank() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Nmt(), normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    return tokenizer


def train(texts: Iterable[str], vocab_size: int | None = None) -> Tokenizer:
    """A unigram vocabulary of `vocab_size` pieces, the same for the same texts on every run.

    Without a size it has 32,000, and fewer where the text cannot fill them.
    """
    if vocab_size is not None:
        check_whole("vocab_size", vocab_size, LEAST_VOCABULARY, MOST_VOCABULARY)
    sample = list(texts)
    characters = Counter[str]()
    for text in sample:
        characters.update(text)
    if all(character.isspace() for character in characters):
        raise UserError("there is no text to train a vocabulary on; check the sources")
    wanted = vocab_size or PIECES
    pieces = _train_pieces(sample, characters, wanted)
    if (filled := len(pieces) + OTHERS) < wanted:
        if vocab_size is not None:
            raise UserError(
                f"{named('vocab_size', vocab_size)} is more than the text can fill; "
                + (f"give at most {filled}, or more text" if filled >= LEAST_VOCABULARY else "give more text")
            )
        fewer = min(filled, characters.total() // CHARACTERS_A_PIECE)
        pieces = _train_pieces(sample, characters, max(LEAST_VOCABULARY, fewer))
    return _assemble(pieces)


def _train_pieces(sample: list[str], characters: Counter[str], vocab_size: int) -> list[tuple[str, float]]:
    """Pieces and their scores, the likeliest first; fewer than asked for where the text has no more."""
    rare = _rare(characters, COVERAGE, most=vocab_size // 4)
    tokenizer = _blank()
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size - OTHERS,
        seed_size=10 * vocab_size,  # type: ignore[call-arg]
        initial_alphabet=[chr(c) for c in range(33, 127)],
        show_progress=False,
    )
    tokenizer.train_from_iterator((text.translate(rare) for text in sample), trainer)
    return _settled(json.loads(tokenizer.to_str())["model"]["vocab"])[: vocab_size - OTHERS]


def _rare(characters: Counter[str], coverage: float, most: int) -> dict[int, str]:
    """Characters to leave out of training: those beyond `coverage`, and all but the `most` frequent."""
    ranked = sorted(characters, key=lambda c: (-characters[c], c))
    left, kept = coverage * characters.total(), 0
    while kept < min(most, len(ranked)) and left > 0:
        left -= characters[ranked[kept]]
        kept += 1
    return {ord(c): " " for c in ranked[kept:]}


def _settled(vocabulary: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
    """The trainer's pieces and scores without what depends on its random hash seed.

    Two things do: the last bits of the scores, and the scores of characters that earned none by themselves, which
    the trainer hands out just above the lowest score in no fixed order.
    """
    low = min(score for _, score in vocabulary)
    floor = low + 1e-4 * (1 + sum(len(piece) == 1 for piece, _ in vocabulary))
    scores = {
        piece: round(low - 1 if len(piece) == 1 and score <= floor else score, 5) for piece, score in vocabulary
    }
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))


def _assemble(pieces: list[tuple[str, float]]) -> Tokenizer:
    names = [PAD, EOS, UNK, *BYTES]
    special = [(piece, NEVER) for piece in names]
    taken = {*names, *SENTINELS}  # text about tokenizers may have made one of these names a piece
    tokenizer = _blank()
    tokenizer.model = models.Unigram(
        [*special, *(p for p in pieces if p[0] not in taken)], unk_id=2, byte_fallback=True
    )
    tokenizer.add_special_tokens([PAD, EOS, UNK, *reversed(SENTINELS)])
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", pair=f"$A {EOS} $B {EOS}", special_tokens=[(EOS, 1)]
    )
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """A folder that `transformers.AutoTokenizer.from_pretrained` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": EOS,
        "unk_token": UNK,
        "additional_special_tokens": SENTINELS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def take(name: str, folder: Path) -> None:
    """Save an existing tokenizer to `folder`: that of a model, a run or prepared data by their folder, a
    tokenizer.json, or one on the hub by its name."""
    import transformers

    name = find_tokenizer(name)
    path = Path(name)
    found: Any
    try:
        if path.is_file():
            try_tokenizer(path)
            found = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path), **_guess_special(path))
        else:
            name = str(_tokenizer_folder(path)) if path.is_dir() else name
            found = load_tokenizer(name)
    except Exception as error:  # the library raises many types, for files and for the network
        raise UserError(
            f"tokenizer {name!r} cannot be loaded ({(str(error).splitlines() or [type(error).__name__])[0]}); "
            "give a folder, a tokenizer.json, or a name on the Hugging Face hub"
        ) from error
    found.save_pretrained(folder)
    if not (folder / "tokenizer.json").exists():
        raise UserError(f"tokenizer {name!r} has no fast form (tokenizer.json); convert it or choose another")


def _tokenizer_folder(path: Path) -> Path:
    """Where the tokenizer of a model folder, of prepared data or of a run lies; a run has the same in every
    checkpoint."""
    newest_first = sorted((path / "checkpoints").glob("step-*"), reverse=True)
    folders = [path, path / "tokenizer", path / "final", *newest_first]
    return next((place for place in folders if (place / "tokenizer.json").is_file()), path)


def _guess_special(path: Path) -> dict[str, str]:
    """A bare tokenizer.json does not say which of its tokens is which; the usual names do."""
    known = Tokenizer.from_file(str(path)).get_vocab()
    usual = {
        "pad_token": (PAD, "[PAD]", "<|endoftext|>"),
        "eos_token": (EOS, "[SEP]", "<|endoftext|>", "<eos>"),
        "unk_token": (UNK, "[UNK]"),
        "cls_token": ("[CLS]",),
        "mask_token": ("[MASK]", "<mask>"),
    }
    return {
        role: next(t for t in names if t in known) for role, names in usual.items() if known.keys() & set(names)
    }


def load(folder: Path) -> Tokenizer:
    """The tokenizer for corpora: names of special tokens in a document are plain text to it."""
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # tokenizers raises plain Exception
        raise UserError(
            f"tokenizer in {folder} is missing or damaged ({error}); prepare the data again"
        ) from error
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def size_of(tokenizer: Tokenizer) -> int:
    """Rows that a table indexed by its ids needs. Ids may have gaps, so this is more than the number of tokens."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def _config(path: Path) -> dict[str, Any]:
    try:
        config = read_json(path) if path.exists() else {}
    except (ValueError, OSError) as error:
        raise UserError(f"{path} is damaged ({error}); {RESTORE}") from error
    if not isinstance(config, dict):
        raise UserError(f"{path} is damaged (no JSON object); {RESTORE}")
    return config


def vocabulary(folder: Path) -> Vocabulary:
    tokenizer = load(folder)
    config_file = folder / "tokenizer_config.json"
    config = _config(config_file)

    def find(*roles: str) -> int | None:
        for role in roles:
            token = config.get(role)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str) and (found := tokenizer.token_to_id(token)) is not None:
                return found
        return None

    eos = find("eos_token", "sep_token")
    if eos is None:
        raise UserError(f"the tokenizer in {folder} names no eos_token or sep_token; add one to {config_file}")
    pad = find("pad_token")
    sentinels = tuple(_present(tokenizer, SENTINELS))
    for role, token in (("eos", eos), ("pad", pad)):
        if token in sentinels:
            raise UserError(
                f"the tokenizer in {folder} has the sentinel {tokenizer.id_to_token(token)!r} for {role}; name "
                f"another token in {config_file}"
            )
    mask = find("mask_token")
    return Vocabulary(
        sha256=sha256_of(folder / "tokenizer.json"),
        size=size_of(tokenizer),
        pad=eos if pad is None else pad,
        eos=eos,
        start=find("cls_token", "bos_token"),
        mask=sentinels[0] if mask is None and sentinels else mask,
        sentinels=sentinels,
    )


def _present(tokenizer: Tokenizer, names: list[str]) -> Iterator[int]:
    for name in names:
        if (found := tokenizer.token_to_id(name)) is None:
            return
        yield found
