"""`SpeculativeGenerationMixin` and `enable`: one more argument for `model.generate`."""

from contextvars import ContextVar
from functools import cache
from inspect import Parameter, signature
from typing import Any, TypeVar

from transformers import PreTrainedModel
from transformers.generation import GenerationConfig, GenerationMixin
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList

from .capability import check_architecture
from .compat import needs_synced_gpus
from .config import SpecDecConfig
from .errors import SpecDecError, UnsupportedOptionError
from .generate import check_combination, run
from .kernels import calling
from .options import check_options

Model = TypeVar("Model", bound=PreTrainedModel)

EXTRAS = ("streamer", "synced_gpus", "tokenizer", "assistant_tokenizer")
_call_tokenizer: ContextVar[Any] = ContextVar("hf_specdec_tokenizer", default=None)


class SpeculativeGenerationMixin(GenerationMixin):
    """`generate` with `assistant_strategy`; without it, plain `generate`, untouched."""

    def generate(self, *args: Any, assistant_strategy: Any = None, **kwargs: Any) -> Any:
        """Plain `generate` with one more argument.

        Args:
            assistant_strategy: a strategy's name, a `DraftStrategy`, a draft model (`PreTrainedModel`), a
                `SpecDecConfig`, a dict or a YAML or JSON file of one, or a factory of a transformers
                `CandidateGenerator`. None is plain `generate`.

        Returns:
            What plain `generate` returns; under `return_dict_in_generate=True` a `SpeculativeOutput`, whose
            `speculation` says what happened.

        Raises:
            SpecDecError: before the first forward pass, for what cannot be done exactly.
        """
        if assistant_strategy is None:
            with calling():
                return super().generate(*args, **kwargs)
        config = SpecDecConfig.of(assistant_strategy)
        check_combination(config)
        given = _by_name(self, args, kwargs)
        if given.get("custom_generate") is not None:
            raise UnsupportedOptionError(
                "`custom_generate` and `assistant_strategy` are two decoding loops; give one."
            )
        check_architecture(self)
        check_options(self._effective_options(given))
        extras = {name: given[name] for name in EXTRAS if given.get(name) is not None}
        if "synced_gpus" not in extras:
            extras["synced_gpus"] = needs_synced_gpus(self)

        def decode(
            model: PreTrainedModel,
            input_ids: Any,
            logits_processor: LogitsProcessorList,
            stopping_criteria: StoppingCriteriaList,
            generation_config: GenerationConfig,
            **model_kwargs: Any,
        ) -> Any:
            return run(
                model, input_ids, logits_processor, stopping_criteria, generation_config, config, extras, model_kwargs
            )

        token = _call_tokenizer.set(extras.get("tokenizer"))
        try:
            return super().generate(**{**given, "custom_generate": decode})
        finally:
            _call_tokenizer.reset(token)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle by the model's own class, since the class made by `enable` cannot be imported."""
        _, _, *state = super().__reduce_ex__(protocol)
        own = type(self).__mro__[type(self).__mro__.index(SpeculativeGenerationMixin) + 1]
        return (_new_enabled, (own,), *state)

    def _effective_options(self, given: dict[str, Any]) -> dict[str, Any]:
        """Options as `generate` will merge them: the call's, then the config's, then the model's defaults."""
        options: dict[str, Any] = {}
        for config in (self.generation_config, given.get("generation_config")):
            if config is not None:
                options |= {name: value for name, value in vars(config).items() if value is not None}
        return options | {name: value for name, value in given.items() if name != "generation_config"}

    def _get_stopping_criteria(self, *args: Any, **kwargs: Any) -> StoppingCriteriaList:
        """Plain `generate`'s criteria, with the call's tokenizer, which is not handed on to a callable."""
        if kwargs.get("tokenizer") is None:
            kwargs["tokenizer"] = _call_tokenizer.get()
        return super()._get_stopping_criteria(*args, **kwargs)


def _by_name(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a `generate` call by name. Raises `TypeError` for those that plain `generate` cannot bind."""
    declared = signature(GenerationMixin.generate)
    given = dict(declared.bind(model, *args, **kwargs).arguments)
    del given[next(iter(declared.parameters))]  # the model itself
    for parameter in declared.parameters.values():
        if parameter.kind is Parameter.VAR_KEYWORD:
            given |= given.pop(parameter.name, {})
    return given


def enable(model: Model) -> Model:
    """Give a model's `generate` the argument `assistant_strategy`. Swaps the model's class in place and returns it.

    `isinstance`, `save_pretrained` and plain `generate` keep working.

    Raises:
        SpecDecError: when `model` has no `generate` of transformers.
    """
    if isinstance(model, SpeculativeGenerationMixin):
        return model
    if "_orig_mod" in getattr(model, "_modules", {}):
        raise SpecDecError(
            f"{type(model).__name__} is a compiled model, whose class cannot be swapped. Enable the model first, then "
            "compile it: `hf_specdec.enable(model)`, then `model.compile()`."
        )
    if not isinstance(model, GenerationMixin):
        raise SpecDecError(
            f"{type(model).__name__} has no `generate` of transformers. Pass the language model itself; of a PEFT "
            "model, `hf_specdec.enable(peft_model.get_base_model())`."
        )
    cls: Any = type(model)
    if cls.generate is not GenerationMixin.generate:
        raise SpecDecError(
            f"{cls.__name__} has a `generate` of its own, which may not hand its options on. Call "
            "`generate` of the language model inside it."
        )
    model.__class__ = speculative_class(cls)
    return model


@cache
def speculative_class(cls: Any) -> Any:
    """The class of an enabled model: `cls` with our `generate`, under the name that `save_pretrained` writes."""
    return type(
        cls.__name__, (SpeculativeGenerationMixin, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__}
    )


def _new_enabled(cls: Any) -> Any:
    """An empty enabled model, for pickle."""
    enabled = speculative_class(cls)
    return enabled.__new__(enabled)
