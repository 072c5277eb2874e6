"""A pretraining run that starts from a model: which one, whether the data fit it, and how it is loaded.

Weights are read when the loop asks for them; all else is known from the model's config and tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn

from altup.core.errors import UserError, named
from altup.core.files import sha256_of
from altup.core.pretrained import lacks_tokenizer, load_config, load_tokenizer
from altup.core.runs import find_model
from altup.core.schema import read_yaml
from altup.data.shards import Manifest
from altup.models.config import AltUpConfig
from altup.models.families import family
from altup.models.foreign import answer_in_sums, check_positions, kind_of, load_language_model
from altup.training.run_folder import RunFolder
from altup.training.sharded import OPTIMIZER
from altup.transformers_hooks import is_widened

if TYPE_CHECKING:
    from altup.data.tokenizer import Vocabulary
    from altup.training.parallel import ProcessGroup
    from altup.training.pretraining import PretrainConfig

# What configs of transformers and of altup call dropout; a model has some of them.
DROPOUT_FIELDS = (
    *("dropout_rate", "attention_dropout", "dropout", "activation_dropout", "hidden_dropout", "ffn_dropout"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "embd_pdrop", "resid_pdrop", "attn_pdrop"),
    *("embedding_dropout", "mlp_dropout"),
)


@dataclass(frozen=True)
class StartingModel:
    """A model to go on from.

    - `place`: its folder or its name on the hub; of a run that resumes, the checkpoint.
    - `config`: its config, with the run's dropout and z-loss.
    - `kind`: which of our families learns as it does, and so the objective.
    - `seal`: what tells its weights from others: their hash, or the hub's commit.
    """

    name: str
    place: str
    config: Any
    kind: str
    seal: str | None

    @property
    def is_altup(self) -> bool:
        return isinstance(self.config, AltUpConfig)

    @property
    def widened(self) -> bool:
        return is_widened(self.config)

    @property
    def title(self) -> str:
        """`LlamaForCausalLM, recycled, K=2`: the class, and how it is widened."""
        title = (self.config.architectures or [self.config.model_type])[0]
        if self.widened:
            return f"{title}, widened: {self.config.altup['method']}, K={self.config.altup['num_blocks']}"
        if self.is_altup and self.config.num_blocks > 1:
            return f"{title}, {self.config.widening}, K={self.config.num_blocks}"
        return title

    def build(self, z_loss: float, checkpoint: Path | None) -> nn.Module:
        """The model with float32 weights, or a checkpoint's."""
        transformers.utils.logging.disable_progress_bar()
        config = self.config if checkpoint is None else load_config(checkpoint)
        on_hub = checkpoint is None and not Path(self.place).exists()
        where = {"revision": self.seal} if on_hub and self.seal else {}
        model = load_language_model(checkpoint or self.place, config, dtype=torch.float32, **where)
        return model if self.is_altup else answer_in_sums(model, z_loss)

    def check_data(self, data: Path, tokenizer: Any, vocabulary: Vocabulary, inputs_length: int) -> None:
        """Refuse data that were made with another tokenizer, or that the model cannot read."""
        again = f"`altup prepare SOURCE --tokenizer {shlex.quote(self.name)} --out DIR`"
        own = _load_tokenizer(self.place)
        if token_hash(own) != token_hash(tokenizer):
            given = Manifest.load(data).settings.get("tokenizer")
            other = f"the tokenizer of {given}" if isinstance(given, str) else "a tokenizer trained for it"
            raise UserError(
                f"{data} was prepared with {other} ({len(tokenizer):,} tokens), not with that of {self.name} "
                f"({len(own):,}), so its ids mean other words; prepare the text with {again}"
            )
        rows = self.config.get_text_config().vocab_size
        if vocabulary.size > rows:
            raise UserError(
                f"{data} has token ids up to {vocabulary.size - 1:,}, the embeddings of {self.name} only {rows:,} "
                "rows; enlarge them (resize_token_embeddings), save the model and give that"
            )
        if family(self.kind).objective == "span-corruption" and not vocabulary.sentinels:
            raise UserError(
                f"the tokenizer of {self.name} has no sentinels (<extra_id_0>, <extra_id_1>, …), which stand for "
                "what span corruption hides; add them (tokenizer.add_tokens, model.resize_token_embeddings), save "
                f"both, and prepare the text again with {again}"
            )
        check_positions(self.config, inputs_length, "inputs_length", self.name)


def find_start(config: PretrainConfig, folder: RunFolder, process_group: ProcessGroup) -> StartingModel:
    """The model that `config.from_model` means, with the run's settings.

    A run that resumes needs it no more: its checkpoint holds the model, and the original may be gone. Where it is
    still there, it must be the one that the run began with. Only the first process reads and hashes weights.
    """
    name = config.from_model
    assert name is not None
    checkpoint = folder.newest_checkpoint(process_group)
    found = _find_weights(config, folder, resumes=checkpoint is not None) if process_group.is_first else None
    place, seal = json.loads(process_group.broadcast(json.dumps(found)) or "")
    read = str(checkpoint or place)
    model = load_config(read)
    kind = kind_of(model, name)
    if config.model not in (None, kind):
        raise UserError(
            f"{named('model', config.model)}: {name} is of the kind {kind!r}; remove it, the model decides"
        )
    if checkpoint is None:
        _adjust(model, config)
    return StartingModel(name, read, model, kind, seal)


def _find_weights(config: PretrainConfig, folder: RunFolder, resumes: bool) -> tuple[str, str | None]:
    """Where the model is, empty if a run that `resumes` can do without it, and the seal of its weights."""
    name = str(config.from_model)
    saved = read_yaml(folder.config) if folder.started and folder.config.exists() else {}
    try:
        place = find_model(name)
    except UserError:
        if not resumes:
            raise
        place = ""
    known = saved.get("from_seal") if saved.get("from_model") == name else None
    known = known or config.from_seal  # a config.yaml that is run again means the same weights
    seal = known
    if place and (Path(place).exists() or known is None):
        try:
            seal = seal_of(place)
        except UserError:
            if not resumes:
                raise
    if known is not None and seal != known:
        raise UserError(
            f"{name} holds other weights than those that the run of this config began with; put them back, leave "
            "from_seal out of the config, or, to resume, rename that folder: a checkpoint holds all that it needs"
        )
    return place, seal


def _adjust(model: Any, config: PretrainConfig) -> None:
    """Put the run's dropout and z-loss into a model's config; None leaves its dropout as it is."""
    if isinstance(model, AltUpConfig):
        model.z_loss = config.z_loss
    if config.dropout is None:
        return
    if not set_dropout(model, config.dropout):
        raise UserError(
            f"{named('dropout', config.dropout)}: the config of {config.from_model} has no field for it; leave "
            "it out"
        )


def set_dropout(model: Any, dropout: float) -> bool:
    """Put `dropout` wherever a model's config has it; False where it has none."""
    names = [name for name in DROPOUT_FIELDS if getattr(model, name, None) is not None]
    for name in names:
        setattr(model, name, dropout)
    return bool(names)


def seal_of(place: str) -> str | None:
    """The hash of a folder's weights, or the commit of a model on the hub."""
    if not Path(place).is_dir():
        return getattr(load_config(place), "_commit_hash", None)
    weights = sorted(p for p in Path(place).glob("*.safetensors") if not p.name.startswith(OPTIMIZER))
    if not weights:
        raise UserError(f"{place} holds no weights as safetensors; save the model with save_pretrained")
    return hashlib.sha256("".join(map(sha256_of, weights)).encode()).hexdigest()


def token_hash(tokenizer: Any) -> str:
    """What tells two vocabularies apart: every token with its id."""
    pairs = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    return hashlib.sha256(repr(pairs).encode()).hexdigest()


def _load_tokenizer(place: str) -> Any:
    remedy = "save the model's tokenizer beside it (tokenizer.save_pretrained)"
    if lacks_tokenizer(place):
        raise UserError(f"{place} has no tokenizer to compare the data with; {remedy}")
    try:
        return load_tokenizer(place)
    except UserError as error:
        raise UserError(f"{error}; {remedy}") from error
