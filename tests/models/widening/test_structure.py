"""Models that `widen` has never seen: recognised by what they do, or refused with a way out."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel

import altup
from altup.core.errors import UserError
from altup.models.widening import structure
from tests.models.widening.families import DECODER, build, inputs


class OddConfig(PreTrainedConfig):
    model_type = "odd"


class OddLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.map = nn.Linear(12, 12)

    def forward(self, x, scale):
        return (x + scale * self.map(x).tanh(),)


class OddModel(PreTrainedModel):
    """Takes `notes`, calls its layers by keyword, and adds a table that it does not hold as an embedding."""

    config_class = OddConfig
    main_input_name = "notes"

    def __init__(self, config):
        super().__init__(config)
        self.tones = nn.Embedding(40, 12)
        self.bars = nn.ParameterList([nn.Parameter(torch.randn(16, 12))])
        self.voices = nn.ModuleList([OddLayer() for _ in range(3)])
        self.norm = nn.LayerNorm(12)
        self.out = nn.Linear(12, 40)
        self.post_init()

    def forward(self, notes, return_dict=True):
        x = self.tones(notes) + self.bars[0][: notes.shape[1]]
        for voice in self.voices:
            x = voice(x=x, scale=0.5)[0]
        return {"logits": self.out(self.norm(x))}


class Tilted(OddModel):
    """Once its layers are wide, its logits are `tilt` times as large."""

    tilt = 1.0

    def forward(self, notes, return_dict=True):
        found = super().forward(notes)["logits"]
        return {"logits": found * self.tilt if hasattr(self.voices[0], "altup") else found}


@pytest.fixture
def odd():
    torch.manual_seed(0)
    return OddModel(OddConfig()).eval()


@pytest.fixture
def clean_handlers(monkeypatch):
    monkeypatch.setattr(structure, "_HANDLERS", dict(structure._HANDLERS))


NOTES = torch.tensor([[1, 2, 3, 39]])


def test_unknown_inputs_get_an_error_with_a_way_out(odd):
    with pytest.raises(UserError) as error:
        altup.widen(odd)
    for words in (
        "'input_ids': [1, 5]",
        "Looked for lists of layers",
        "example=",
        "register_handler('odd'",
        "Structure(stacks=",
    ):
        assert words in str(error.value)


def test_an_example_is_enough_to_find_the_layers(odd):
    wide = altup.widen(copy.deepcopy(odd), "recycled", 3, example={"notes": NOTES})
    torch.testing.assert_close(wide(NOTES)["logits"], odd(NOTES)["logits"], rtol=0, atol=1e-5)
    assert altup.narrow(wide)(NOTES)["logits"].equal(odd(NOTES)["logits"])


@pytest.mark.usefixtures("clean_handlers")
@pytest.mark.parametrize("method", ["recycled", "altup"])
def test_registered_handler(odd, method, tmp_path):
    altup.register_handler(
        "odd",
        lambda model: altup.Structure(
            stacks=["voices"], entries=["tones.weight", "bars.0"], example={"notes": NOTES}
        ),
    )
    wide = altup.widen(copy.deepcopy(odd), method)
    with torch.no_grad():
        wide.voices[1].altup.g.mul_(0.5)
    assert not torch.allclose(wide(NOTES)["logits"], odd(NOTES)["logits"], atol=1e-3)
    wide.save_pretrained(tmp_path)
    loaded = altup.load_widened(tmp_path, model_class=OddModel)
    torch.testing.assert_close(loaded(NOTES)["logits"], wide(NOTES)["logits"])


@pytest.mark.usefixtures("clean_handlers")
def test_a_handler_that_names_no_list_of_layers(odd):
    altup.register_handler("odd", lambda model: altup.Structure(stacks=["voicez"], example={"notes": NOTES}))
    with pytest.raises(UserError, match="no list of layers named 'voicez'; name one or more of voices"):
        altup.widen(odd)


@pytest.mark.usefixtures("clean_handlers")
def test_one_structure_for_many_models(odd):
    """One model's example does not become the next one's; and what is no structure is told."""
    structure = altup.Structure(stacks=["voices"])
    altup.register_handler("odd", lambda model: structure)
    altup.widen(copy.deepcopy(odd), example={"notes": NOTES})
    assert structure.example is None
    altup.register_handler("odd", lambda model: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(UserError, match="handler registered for 'odd' returned a NoneType"):
        altup.widen(odd, example={"notes": NOTES})


@pytest.mark.usefixtures("clean_handlers")
def test_a_failure_changes_nothing(odd):
    """A table that the handler forgets is noticed when the widened model runs."""
    altup.register_handler(
        "odd", lambda model: altup.Structure(entries=["tones.weight"], example={"notes": NOTES})
    )
    before, expected = copy.deepcopy(odd.state_dict()), odd(NOTES)["logits"]
    with pytest.raises(UserError, match=r"with tones.weight widened it fails: The size of tensor"):
        altup.widen(odd, "altup")
    assert odd.state_dict().keys() == before.keys()
    assert all(weight.equal(before[name]) for name, weight in odd.state_dict().items())
    assert odd(NOTES)["logits"].equal(expected)
    assert not hasattr(odd.config, "altup")


class Meddling(OddModel):
    """Begins anew where it does not find the tensor that it knows."""

    def forward(self, notes, return_dict=True):
        x = self.tones(notes)
        for voice in self.voices:
            x = voice(x, 0.5)[0]
            x = x if isinstance(x, torch.Tensor) else self.tones(notes)
        return {"logits": self.out(self.norm(x))}


def test_a_model_that_replaces_the_state_is_refused():
    told = r"Meddling cannot be widened: it does not hand the widened state from each layer to.*register_handler"
    with pytest.raises(UserError, match=told):
        altup.widen(Meddling(OddConfig()), example={"notes": NOTES})


class Projected(OddModel):
    """Has a list with one map of the state beside its layers."""

    def __init__(self, config):
        super().__init__(config)
        self.projections = nn.ModuleList([nn.Linear(12, 12)])

    def forward(self, notes, return_dict=True):
        x = self.projections[0](self.tones(notes))
        for voice in self.voices:
            x = voice(x, 0.5)[0]
        return {"logits": self.out(self.norm(x))}


def test_a_list_of_one_map_is_no_stack():
    model = altup.widen(Projected(OddConfig()), example={"notes": NOTES})
    assert list(model.config.altup["stacks"]) == ["voices"]
    model = Projected(OddConfig())
    model.voices = nn.ModuleList()
    with pytest.raises(UserError, match=r"found no stack of layers in \['projections'\]"):
        altup.widen(model, example={"notes": NOTES})


class Listless(PreTrainedModel):
    config_class = OddConfig

    def __init__(self, config):
        super().__init__(config)
        self.table = nn.Embedding(40, 12)
        self.out = nn.Linear(12, 40)
        self.post_init()

    def forward(self, input_ids, return_dict=True):
        return {"logits": self.out(self.table(input_ids))}


def test_no_layers_at_all():
    with pytest.raises(UserError, match="found no stack of layers"):
        altup.widen(Listless(OddConfig()))


@pytest.mark.parametrize("method", ["recycled", "altup"])
def test_a_vocabulary_of_four(method):
    """Bases of DNA, say: the example made up has no more tokens than the model."""
    model = LlamaForCausalLM(LlamaConfig(**{**DECODER, "vocab_size": 4})).eval()
    ids = torch.tensor([[0, 1, 2, 3]])
    expected = model(ids).logits
    torch.testing.assert_close(altup.widen(model, method)(ids).logits, expected, rtol=0, atol=1e-5)


def test_other_models_are_refused():
    with pytest.raises(UserError, match=r"Linear is not a Hugging Face model .* altup.AltUp"):
        altup.widen(nn.Linear(2, 2))
    with pytest.raises(UserError, match="OptimizedModule is not a Hugging Face model"):
        altup.widen(torch.compile(build("llama")))
    config = altup.AltUpT5Config.from_preset("tiny", vocab_size=50)
    with pytest.raises(UserError, match="has AltUp built in"):
        altup.widen(altup.AltUpT5ForConditionalGeneration(config))
    with pytest.raises(UserError, match="widened already"):
        altup.widen(altup.widen(build("llama")))


def test_replaced_forwards_are_refused():
    model = build("llama")
    model.model.layers[0].forward = model.model.layers[0].forward
    with pytest.raises(UserError, match="forward of LlamaDecoderLayer was replaced"):
        altup.widen(model)
    assert not hasattr(model.model.layers[1], "altup")


def test_layer_drop_is_refused():
    model = build("whisper")
    model.config.encoder_layerdrop = 0.1
    with pytest.raises(UserError, match=r"encoder_layerdrop=0.1 of the 'whisper' config skips whole"):
        altup.widen(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "dense"}, "method='dense' is not known; choose one of 'altup', 'sameup', 'recycled'"),
        ({"num_blocks": 1}, "num_blocks=1 makes no sense"),
        ({"selection": "random"}, "selection='random' is not known"),
        ({"selection": [0, 1]}, "must be 'alternating', 'same' or a list"),
        ({"method": "sameup", "selection": "alternating"}, "does not fit method='sameup'"),
    ],
)
def test_bad_choices(options, message):
    model = build("llama")
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(UserError, match=message.replace("[", r"\[")):
        altup.widen(model, **options)
    assert [name for name, _ in model.named_parameters()] == names


@pytest.mark.parametrize("inputs", [2, 4])
def test_gemma3n_is_refused(inputs):
    """With two, its list of one projection is no stack of layers."""
    from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

    config = Gemma3nTextConfig(
        vocab_size=40,
        vocab_size_per_layer_input=40,
        hidden_size=16,
        hidden_size_per_layer_input=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        laurel_rank=4,
        layer_types=["full_attention"] * 2,
        num_kv_shared_layers=0,
        activation_sparsity_pattern=[0.0, 0.0],
        altup_num_inputs=inputs,
    )
    with pytest.raises(UserError, match=r"Gemma3nForCausalLM has AltUp of its own.*altup\.accelerate"):
        altup.widen(Gemma3nForCausalLM(config))


def test_an_example_that_is_no_dict_is_refused():
    with pytest.raises(UserError, match="example is a Tensor; give a dict"):
        altup.widen(build("llama"), example=torch.tensor([[1, 2]]))


@pytest.mark.parametrize("method", ["recycled", "altup"])
def test_only_the_stacks_that_are_named(method):
    model = build("whisper")
    before = copy.deepcopy(model)
    altup.widen(model, method, stacks=["model.encoder.layers"])
    assert hasattr(model.model.encoder.layers[0], "altup")
    assert not hasattr(model.model.decoder.layers[0], "altup")
    batch = inputs(model)
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits, before(**batch).logits, rtol=0, atol=1e-5)
    with pytest.raises(UserError, match=r"no list of layers named 'encoder'; name one or more of"):
        altup.widen(before, stacks=["encoder"])
    with pytest.raises(UserError, match="is no list of names"):
        altup.widen(before, stacks="model.encoder.layers")


@pytest.mark.parametrize("tilt", [1.01, 1.3, -1.0])
def test_a_model_that_computes_something_else_when_wide_is_refused(tilt):
    """Nothing but the comparison of the outputs can see it, at a hundredth as well as at another function."""
    torch.manual_seed(0)
    model = Tilted(OddConfig()).eval()
    model.tilt = tilt
    state, example = copy.deepcopy(model.state_dict()), {"notes": torch.tensor([[1, 5, 9]])}
    with pytest.raises(UserError, match="widened, it computes something else"):
        altup.widen(model, example=example)
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())
    model.tilt = 1.0
    altup.widen(model, example=example)
