"""Recipes: everything that defines one run, strict, frozen and hashed.

A recipe has three sections, `[data]`, `[model]` and `[train]`. A key that names a part (a mixer, an optimizer, a source)
is a string, or a table with `name` and its options. Unknown keys are errors that name the nearest valid key.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    model_serializer,
    model_validator,
)

from keyhole.core.errors import InputError, nearest
from keyhole.core.toml import to_toml


class Spec(BaseModel):
    """A replaceable thing: its name and its options. Written as a string when there are no options."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str = Field(min_length=1)
    options: dict[str, Any] = {}

    @model_serializer
    def _as_written(self) -> str | dict[str, Any]:
        return {"name": self.name, **self.options} if self.options else self.name

    def __str__(self) -> str:
        given = ", ".join(f"{key}={value!r}" for key, value in self.options.items())
        return f"{self.name}({given})" if given else self.name


def _read_spec(value: Any) -> Any:
    if isinstance(value, str):
        return {"name": value}
    if isinstance(value, dict):
        if "name" not in value:
            raise ValueError('a table here needs a `name`, for example { name = "softmax", qk_norm = true }')
        options = {key: item for key, item in value.items() if key != "name"}
        return {"name": value["name"], "options": options}
    if isinstance(value, Spec):
        return value
    raise ValueError("give a name, or a table with `name` and its options")


PartSpec = Annotated[Spec, BeforeValidator(_read_spec)]


def _read_one_or_many(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        return Spec.model_validate(_read_spec(value))
    return tuple(Spec.model_validate(_read_spec(item)) for item in value)


PartSpecs = Annotated[Spec | tuple[Spec, ...], BeforeValidator(_read_one_or_many)]


class Section(BaseModel):
    """One table of a recipe: frozen, typed, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)


class Data(Section):
    """Where the text comes from and how it is cut."""

    source: PartSpec = Spec(name="builtin:python")
    """`builtin:python`, a file, a folder, `data:FILE`, `hf:NAME`, `hf:FOLDER` or `task:NAME`."""
    tokenizer: PartSpec = Spec(name="chars")
    """`bytes`, `chars`, `words`, `bpe`. Tasks bring their own."""
    block: int = Field(64, ge=1)
    """The longest context in tokens."""
    rows: Literal["text", "lines", "sentences", "paragraphs", "files"] = "text"
    """`text` packs the whole text without gaps; the others make one row of each document, padded."""
    split: float = Field(0.9, gt=0, lt=1)
    """The first part that trains; the rest is the dev split. The two never overlap."""
    seed: int = Field(0, ge=0)
    """The order of the data. The same for every model."""


class Model(Section):
    """What the model is built of."""

    layers: int = Field(4, ge=1)
    """Blocks on the residual stream."""
    width: int = Field(128, ge=1)
    """Channels of the residual stream; divisible by heads."""
    heads: int = Field(4, ge=1)
    """Heads of a mixer."""
    kv_heads: int | None = Field(None, ge=1)
    """Key-value heads shared by groups of query heads; as many as heads when not given."""
    mixer: PartSpecs = Spec(name="softmax")
    """How tokens read one another; a list has one mixer for each layer: `["linear", "softmax"]`."""
    position: PartSpec = Spec(name="learned")
    """How a token knows its place: `learned`, `sinusoidal`, `rope`, `alibi`, `none`."""
    merge: PartSpec = Spec(name="concat")
    """How heads join: `concat`, `shuffle`, `shift`, `reweight-running`, `talking`, and the dishonest `reweight`."""
    norm: PartSpec = Spec(name="layer")
    """`layer` or `rms`. Query-key norm is an option of the mixer: `{ name = "softmax", qk_norm = true }`."""
    feed: PartSpec = Spec(name="gelu")
    """`gelu`, `relu-squared` or `swiglu`."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Of the embedding and of what each branch adds to the stream."""
    tie: bool = True
    """Whether the output head is the embedding."""
    init: Literal["standard", "quiet", "mup", "unit"] = "standard"
    """`standard` is GPT-2's, `quiet` starts blocks and head at zero; with `mup` and `unit` one rate fits all widths."""
    base_width: int = Field(64, ge=1)
    """At this width the rates of `mup` and `unit` equal `train.rate`. Keep width / heads fixed when the width grows."""

    @property
    def mixers(self) -> tuple[Spec, ...]:
        """The mixer of each layer."""
        return (self.mixer,) * self.layers if isinstance(self.mixer, Spec) else self.mixer

    def specs(self, kind: str) -> tuple[Spec, ...]:
        """The parts of a kind that this model is built of, each once."""
        found = getattr(self, kind)
        return (found,) if isinstance(found, Spec) else tuple({str(spec): spec for spec in found}.values())

    @model_validator(mode="after")
    def _one_mixer_a_layer(self) -> Self:
        if len(self.mixers) != self.layers:
            raise ValueError(
                f"mixer is a list of {len(self.mixers)} for {self.layers} layers; give one for each, or one for all"
            )
        return self

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        if self.width % self.heads:
            fits = [h for h in range(1, self.width + 1) if self.width % h == 0 and h <= 4 * self.heads]
            raise ValueError(f"width {self.width} is not divisible by heads {self.heads}; heads may be {_some(fits)}")
        if self.kv_heads and self.heads % self.kv_heads:
            fits = [h for h in range(1, self.heads + 1) if self.heads % h == 0]
            given = f"heads {self.heads} is not divisible by kv_heads {self.kv_heads}"
            raise ValueError(f"{given}; it may be {_some(fits)}")
        return self


class Train(Section):
    """How the model is trained."""

    steps: int | None = Field(None, ge=1)
    """The budget in optimizer steps. Give at most one of steps, tokens and seconds; 1,000 steps when none is given."""
    tokens: int | None = Field(None, ge=1)
    """The budget in predicted tokens."""
    seconds: float | None = Field(None, gt=0)
    """The budget in seconds of training; evaluating and saving do not count."""
    batch: int = Field(12, ge=1)
    """Rows in one optimizer step, over all processes and all accumulated pieces."""
    accumulate: int = Field(1, ge=1)
    """Into how many pieces the batch is cut to save memory."""
    optimizer: PartSpec = Spec(name="adamw")
    """`sgd`, `adagrad`, `adam`, `adamw`, `sign` or `muon` (`adam_rate` is for what is no matrix: rate / 5 if 0)."""
    rate: float = Field(1e-3, gt=0)
    """The learning rate at its highest."""
    schedule: PartSpec = Spec(name="cosine")
    """`constant`, `cosine`, `linear` or `trapezoid`."""
    warmup: float = Field(0.02, ge=0)
    """Steps of linear warm-up; below 1, the fraction of the budget."""
    clip: float = Field(1.0, ge=0)
    """The largest gradient norm; 0 never clips."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """What the model computes in; `auto` is the faster by a probe. Weights are always kept in float32."""
    compile: bool = False
    """Whether `torch.compile` prepares the model: worth its 15-60 seconds only in long runs."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """What joins the processes when started by torchrun."""
    seed: int = Field(0, ge=0)
    """The initial weights and dropout."""
    eval_every: int = Field(0, ge=0)
    """Steps between dev losses; 0 measures ten times a run."""
    eval_tokens: int = Field(0, ge=0)
    """How many dev tokens each of these reads, always the same ones; 0 reads the whole dev split."""
    save_every: int = Field(0, ge=0)
    """Steps between checkpoints; 0 saves about once in 30 seconds and at the end."""
    log_every: int = Field(0, ge=0)
    """Steps between lines of metrics; 0 writes about 100 lines a run."""

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        given = [name for name in ("steps", "tokens", "seconds") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"give one of steps, tokens, seconds, not {' and '.join(given)}")
        if self.batch % self.accumulate:
            raise ValueError(f"batch {self.batch} is not divisible by accumulate {self.accumulate}")
        return self


class Recipe(Section):
    """Everything that defines one run."""

    data: Data = Data()
    model: Model = Model()
    train: Train = Train()
    _folder: Path = PrivateAttr(default_factory=Path.cwd)

    @property
    def folder(self) -> Path:
        """Where relative paths in this recipe are looked up first."""
        return self._folder

    @classmethod
    def load(cls, path: str | Path) -> Recipe:
        """Read a recipe from a TOML file."""
        path = Path(path)
        return cls.parse(read_toml(path, "recipe", "recipes/first.toml"), where=str(path), folder=path.resolve().parent)

    @classmethod
    def parse(cls, values: dict[str, Any], *, where: str = "the recipe", folder: Path | None = None) -> Recipe:
        """Check nested values; `where` says in errors what they came from."""
        try:
            recipe = cls.model_validate(values)
        except ValidationError as error:
            raise InputError(f"{where}: {first_error(error, cls)}") from None
        if folder is not None:
            recipe._folder = folder
        return recipe

    def replace(self, changes: dict[str, Any]) -> Recipe:
        """The same recipe with some keys changed: `{"model.position": "rope", "train.steps": 200}`."""
        values = self.model_dump()
        if any(key in ("train.steps", "train.tokens", "train.seconds") for key in changes):
            # A new budget takes the place of the old one; two new ones are refused below.
            values["train"].update(steps=None, tokens=None, seconds=None)
        for key, value in changes.items():
            section, _, name = key.partition(".")
            if not name or section not in values:
                raise InputError(f"there is no recipe key {key!r}; write it as section.key, for example train.steps")
            values[section][name] = value
        return Recipe.parse(values, folder=self._folder)

    def to_toml(self) -> str:
        """The recipe as TOML, every default filled in."""
        return to_toml(self.model_dump())

    @property
    def hash(self) -> str:
        """Twelve hex digits that name this recipe."""
        text = json.dumps(self.model_dump(), sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def read_toml(path: Path, what: str, example: str) -> dict[str, Any]:
    """The values of a TOML file, or one sentence that says why there are none."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"there is no {what} {path}; give a TOML file such as {example}") from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder; give a {what} file such as {path / (what + '.toml')}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not a TOML file: {error}") from None


def parse_setting(text: str) -> tuple[str, Any]:
    """Read `train.steps=100` from a command line; the value is TOML, or else a plain string."""
    key, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"--set takes section.key=value, not {text!r}; for example --set train.steps=100")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError as error:
        if value.strip()[:1] in ("[", "{"):
            hint = 'names want quotes: \'model.mixer=["linear", "softmax"]\''
            raise InputError(f"--set {key.strip()}: {value.strip()} is not TOML ({error}); {hint}") from None
        return key.strip(), value.strip()


def first_error(error: ValidationError, model: type[BaseModel]) -> str:
    """One sentence for the first thing that is wrong, with the nearest valid key where one is unknown."""
    first = error.errors()[0]
    place = [str(step) for step in first["loc"]]
    dotted = ".".join(place)
    if first["type"] == "extra_forbidden":
        return f"unknown key {dotted!r}{nearest(place[-1], _table(model, place[:-1]).model_fields)}"
    if first["type"] == "missing":
        return f"{dotted} is missing"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return f"{dotted}: {message}" if dotted else message
    return f"{dotted} = {first['input']!r} is not valid: {message[0].lower()}{message[1:]}"


def _table(model: type[BaseModel], place: list[str]) -> type[BaseModel]:
    """The table that stands at a place of a file whose whole is `model`; tables by name (`[arms.NAME]`) are all alike."""
    for step in place:
        field = model.model_fields.get(step)
        if field is None:
            continue
        kinds = (field.annotation, *get_args(field.annotation))
        model = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), model)
    return model


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[-12:]))
