"""Refuse overrides and callbacks that Transformers cannot call, since they would end a run at its first step or checkpoint.

Most were written for an older Transformers, such as `log(self, logs)`. The source of the installed Transformers shows how it
calls each method, so the check reads the calls in all methods that a run reaches. It reads the source only if an override
has a different signature than the method of Transformers, so it costs nothing otherwise.
"""

import ast
import functools
import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping, Set
from typing import Any, Final, NamedTuple

import transformers
from transformers import Trainer, TrainerCallback

from doppler_hf.errors import Refusal
from doppler_hf.privacy.clipping.engine import without_self
from doppler_hf.run.own_code import LIBRARIES, Definition, definitions

# The arguments that `CallbackHandler.call_event` passes to every event, and the additional arguments of some events.
_OF_EVERY_EVENT: Final = ("model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")
_OF_EVENTS: Final = {"on_evaluate": ("metrics",), "on_predict": ("metrics",), "on_log": ("logs",)}
_IN_EVALUATIONS: Final = ("on_evaluate", "on_prediction_step", "on_predict")
_OURS: Final = "compute_per_sample_loss"
# Conditions in the libraries' sources that are false in every private run.
_NEVER_TRUE: Final = (
    "disable_dp", "delay_optimizer_creation", "is_fsdp_enabled", "is_fsdp_xla_enabled", "is_fsdp_xla_v2_enabled",
    "is_deepspeed_enabled", "is_sagemaker_mp_enabled", "is_torch_xla_available", "is_distributed_loading_by_transformers",
    "auto_find_batch_size", "use_liger_kernel",
)  # fmt: skip


class Call(NamedTuple):
    """How a method is called."""

    positional: int
    keywords: tuple[str, ...] = ()


def refuse_other_signatures(trainer: Any) -> None:
    """Refuse overrides that Transformers cannot call, and overrides that call `super()` with wrong arguments."""
    own: dict[str, list[Definition]] = {}
    for name in _names_of_methods():
        found = [each for each in definitions(trainer, name) if each.is_user_code and callable(getattr(trainer, name))]
        if found:
            own[name] = found
    called = {name: each[0] for name, each in own.items() if next(definitions(trainer, name)) == each[0]}
    others = {name: each for name, each in called.items() if not _takes_all(getattr(trainer, name), _stock(name))}
    if others:
        calls = {_OURS: {Call(2)}, **_calls_in_a_run(trainer)}
        for name, definition in others.items():
            for call in sorted(calls.get(name, ())):
                _refuse_unless_it_takes(getattr(trainer, name), call, definition=definition)
    for definition in [each for found in own.values() for each in found]:
        _refuse_wrong_calls_of_super(trainer, definition)


# Names that older versions of Transformers gave to what is `processing_class` now.
_OLD_NAMES: Final = ("tokenizer", "image_processor", "feature_extractor")


def refuse_callbacks_of_other_signatures(trainer: Any) -> None:
    """Refuse callbacks with an event that Transformers cannot call, such as one without `**kwargs`."""
    saves, evaluates = _saves(trainer), _evaluates(trainer)
    for callback in trainer.callback_handler.callbacks:
        for event in _events():
            is_never_called = (event == "on_save" and not saves) or (event in _IN_EVALUATIONS and not evaluates)
            function = getattr(callback, event, None)
            if is_never_called or getattr(function, "__func__", None) is getattr(TrainerCallback, event):
                continue
            own = _OF_EVENTS.get(event, ())
            line = f"def {event}(self, args, state, control, {''.join(f'{name}, ' for name in own)}**kwargs):"
            name = callback.__name__ if isinstance(callback, type) else type(callback).__name__
            if function is None:
                raise Refusal(
                    "callback-signature",
                    f"The callback {name} has no method {event}, but Transformers calls it. Derive its class from "
                    "TrainerCallback.",
                )
            wrong = _what_is_wrong(function, Call(3, (*_OF_EVERY_EVENT, *own)), ("args", "state", "control"))
            if wrong:
                raise Refusal(
                    "callback-signature",
                    f"{name}.{event} {wrong}. The run would fail there after spending ε. Write `{line}`.",
                )
            for key in _arguments_used(function):
                if key in (*_OF_EVERY_EVENT, *own):
                    continue
                instead = "processing_class" if key in _OLD_NAMES else None
                raise Refusal(
                    "callback-signature",
                    f"{name}.{event} uses its argument {key}, but Transformers {transformers.__version__} does not pass it, "
                    "so it is None. The run would fail there after spending ε. "
                    + (f"Call it {instead}, its new name." if instead else f"Ask first whether {key} is None."),
                )
            for key in _keys_read(function):
                if key in (*_OF_EVERY_EVENT, *own):
                    continue
                instead = "processing_class" if key in _OLD_NAMES else None
                raise Refusal(
                    "callback-signature",
                    f"{name}.{event} reads kwargs[{key!r}], but Transformers {transformers.__version__} does not pass it. "
                    "The run would fail there after spending ε. "
                    + (f"Read kwargs[{instead!r}], its new name." if instead else f"Read kwargs.get({key!r})."),
                )


def _arguments_used(function: Any) -> Iterator[str]:
    """Yield the arguments of a callback's event that are None by default, and of which it reads something without asking."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    if (getattr(function, "__module__", None) or "").partition(".")[0] in LIBRARIES or (tree := _tree_of(function)) is None:
        return
    given = next((node.args for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)), None)
    nodes = [*ast.walk(tree)]
    if given is None or any(isinstance(node, ast.Try) for node in nodes):
        return
    positional = [*given.posonlyargs, *given.args]
    pairs = [*zip(positional[len(positional) - len(given.defaults) :], given.defaults, strict=True)]
    pairs += [*zip(given.kwonlyargs, given.kw_defaults, strict=True)]  # type: ignore[list-item]
    optional = [each.arg for each, default in pairs if isinstance(default, ast.Constant) and default.value is None]
    # What is compared, tested, or assigned may be something else than None where it is used.
    asking = (ast.If, ast.IfExp, ast.While, ast.BoolOp, ast.Compare, ast.Assert)
    asked = {
        inner.id
        for node in nodes
        if isinstance(node, asking)
        for inner in ast.walk(node if isinstance(node, ast.BoolOp | ast.Compare) else node.test)
        if isinstance(inner, ast.Name)
    }
    asked |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in nodes:
        match node:
            case (
                ast.Attribute(value=ast.Name(id=name))
                | ast.Subscript(value=ast.Name(id=name))
                | ast.Call(func=ast.Name(id=name))
            ):
                if name in optional and name not in asked:
                    yield name
            case _:
                pass


def _keys_read(function: Any) -> Iterator[str]:
    """Yield the keys that a callback's event reads from its `**kwargs` without asking whether they are there."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    if (getattr(function, "__module__", None) or "").partition(".")[0] in LIBRARIES or (tree := _tree_of(function)) is None:
        return
    given = next((node.args.kwarg for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)), None)
    nodes = [*ast.walk(tree)]
    if given is None or any(isinstance(node, ast.Try) for node in nodes):
        return
    asked = {
        node.value
        for each in nodes
        if isinstance(each, ast.Compare)
        for node in [each.left]
        if isinstance(node, ast.Constant)
    }
    for node in nodes:
        match node:
            case ast.Subscript(value=ast.Name(id=given.arg), slice=ast.Constant(value=str(key)), ctx=ast.Load()):
                pass
            case ast.Call(func=ast.Attribute(value=ast.Name(id=given.arg), attr="pop"), args=[ast.Constant(value=str(key))]):
                pass
            case _:
                continue
        if key not in asked:
            yield key


def _tree_of(function: Any) -> ast.Module | None:
    """Return the syntax tree of a function's source, or None if it has no source file, such as code from a string."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None


@functools.cache
def _events() -> list[str]:
    return [name for name in vars(TrainerCallback) if name.startswith("on_") and name != "on_init_end"]


def _saves(trainer: Any) -> bool:
    return bool(trainer.args.save_strategy != "no")


def _evaluates(trainer: Any) -> bool:
    """Return whether the run evaluates, or has an evaluation set that the user will evaluate later."""
    return bool(trainer.args.eval_strategy != "no" or trainer.eval_dataset is not None)


def _names_of_methods() -> Iterator[str]:
    """Yield the names of the methods of Transformers' `Trainer`, and of our own method."""
    for name, value in vars(Trainer).items():
        if inspect.isfunction(value) and name != "__init__":
            yield name
    yield _OURS


def _stock(name: str) -> inspect.Signature:
    """Return Transformers' signature of a method, or of our own method, without `self`."""
    if name == _OURS:
        return inspect.Signature([inspect.Parameter(each, _NAMED) for each in ("model", "inputs")])
    return without_self(inspect.signature(getattr(Trainer, name)))


_NAMED: Final = inspect.Parameter.POSITIONAL_OR_KEYWORD
_ANY_POSITIONAL: Final = inspect.Parameter.VAR_POSITIONAL
_ANY_KEYWORD: Final = inspect.Parameter.VAR_KEYWORD


def _signature_of(function: Any) -> inspect.Signature | None:
    """Return the signature of a function or a bound method, or None if Python cannot tell it.

    A decorator's wrapper that takes any arguments passes them on, so the signature of the wrapped function counts.
    """
    bound = inspect.ismethod(function)
    inner = function.__func__ if bound else function
    try:
        while True:
            signature = inspect.signature(inner, follow_wrapped=False)
            kinds = [each.kind for each in signature.parameters.values()]
            if not hasattr(inner, "__wrapped__") or kinds != [_ANY_POSITIONAL, _ANY_KEYWORD]:
                break
            inner = inner.__wrapped__
        return without_self(signature) if bound and kinds[:1] != [_ANY_POSITIONAL] else signature
    except (TypeError, ValueError):
        return None


def _takes_all(function: Any, stock: inspect.Signature) -> bool:
    """Return whether a function takes all arguments of Transformers' method, by position or by name."""
    signature = _signature_of(function)
    if signature is None:
        return True
    own, theirs = [*signature.parameters.values()], [*stock.parameters.values()]
    if {_ANY_POSITIONAL, _ANY_KEYWORD} <= {each.kind for each in own}:
        return all(each.default is not each.empty or each.kind != _NAMED for each in own[len(theirs) :])
    same = [each.name for each in own[: len(theirs)]] == [each.name for each in theirs]
    # Arguments that Transformers may leave out must be optional in the override, too.
    same &= all(
        mine.default is not mine.empty or each.default is each.empty for mine, each in zip(own, theirs, strict=False)
    )
    required = [each for each in own[len(theirs) :] if each.default is each.empty and each.kind not in _ANY]
    return same and all(each.kind == _NAMED for each in own[: len(theirs)]) and not required


_ANY: Final = (_ANY_POSITIONAL, _ANY_KEYWORD)


def _what_is_wrong(function: Any, call: Call, names: tuple[str, ...]) -> str | None:
    """Return in words why a function cannot be called like this, or None if it can.

    Args:
        function: The function, or the bound method.
        call: How Transformers calls it.
        names: Transformers' names of the positional arguments.
    """
    signature = _signature_of(function)
    if signature is None:
        return None
    try:
        signature.bind(*[None] * call.positional, **dict.fromkeys(call.keywords))
    except TypeError as error:
        kinds = {each.kind for each in signature.parameters.values()}
        own = [each.name for each in signature.parameters.values() if each.kind not in _ANY]
        by_place = [
            each for each in signature.parameters.values() if each.kind not in (*_ANY, inspect.Parameter.KEYWORD_ONLY)
        ]
        lacking = [] if _ANY_POSITIONAL in kinds else [*names[len(by_place) : call.positional]]
        lacking += [] if _ANY_KEYWORD in kinds else [name for name in call.keywords if name not in own]
        version = f"Transformers {transformers.__version__}"
        if lacking:
            return f"does not take {', '.join(lacking)}, but {version} passes it"
        return f"cannot be called as {version} calls it ({error})"
    return None


def _refuse_unless_it_takes(function: Any, call: Call, *, definition: Definition) -> None:
    name, stock = definition.name, _stock(definition.name)
    if wrong := _what_is_wrong(function, call, (*stock.parameters,)):
        raise Refusal(
            "old-signature",
            f"{definition.place} {wrong}. The run would fail there after spending ε. Write `"
            f"{_line(name, stock, has_self=inspect.ismethod(function))}`.",
        )


def _line(name: str, stock: inspect.Signature, *, has_self: bool) -> str:
    """Return the first line of a method that Transformers can call."""
    plain = [each.replace(annotation=each.empty) for each in stock.parameters.values()]
    first = [inspect.Parameter("self", _NAMED)] if has_self else []
    return f"def {name}{stock.replace(parameters=[*first, *plain], return_annotation=inspect.Signature.empty)}:"


# --- the arguments that an override passes on to Transformers -------------------------------------------------------------


def _refuse_wrong_calls_of_super(trainer: Any, definition: Definition) -> None:
    """Refuse `super().method(...)` with arguments that the method of this Transformers does not take."""
    if not isinstance(definition.owner, type):
        return
    for name, call in _calls_of_super(definition.value):
        method = getattr(super(definition.owner, trainer), name, None)
        signature = None if method is None else _signature_of(method)
        if call is None or signature is None:
            continue
        try:
            signature.bind(*[None] * call.positional, **dict.fromkeys(call.keywords))
        except TypeError as error:
            stock = _stock(name) if hasattr(Trainer, name) else signature
            raise Refusal(
                "old-signature",
                f"{definition.place} calls super().{name} with arguments that Transformers {transformers.__version__} does "
                f"not accept: {error}. The run would fail there after spending ε. Call it as in "
                f"`{_line(name, stock, has_self=True)}`.",
            ) from None


def _calls_of_super(function: Any) -> Iterator[tuple[str, Call | None]]:
    """Yield the methods that a function calls on `super()`, and how it calls them; None if `*args` hides that."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    if "super" not in getattr(getattr(function, "__code__", None), "co_names", ()):
        return
    if (tree := _tree_of(function)) is None:
        return
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=name)):
                yield name, _call_of(node)


def _call_of(node: ast.Call) -> Call | None:
    keywords = [each.arg for each in node.keywords]
    if None in keywords or any(isinstance(each, ast.Starred) for each in node.args):
        return None
    return Call(len(node.args), tuple(str(each) for each in keywords))


# --- how Transformers calls its own methods -------------------------------------------------------------------------------


@functools.cache
def _methods_in(cls: type) -> Mapping[str, ast.FunctionDef]:
    """Return the methods of a library's class as syntax trees of its source."""
    try:
        tree = _source(cls.__module__)
    except (OSError, TypeError, SyntaxError):
        return {}
    found = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls.__name__)
    return {node.name: node for body in found for node in body.body if isinstance(node, ast.FunctionDef)}


@functools.cache
def _source(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(sys.modules[module]))


def _calls_in_a_run(trainer: Any) -> dict[str, set[Call]]:
    """Return for each method how a run of this trainer calls it, from the sources of the libraries' classes."""
    order = [cls for cls in type(trainer).__mro__ if cls.__module__.partition(".")[0] in LIBRARIES]
    never_called = {*(() if _saves(trainer) else ("_save_checkpoint", "save_model"))}
    never_called |= {*(() if _evaluates(trainer) else ("_evaluate", "evaluate"))}
    never_true = {*_NEVER_TRUE, *(() if trainer.args.push_to_hub else ("push_to_hub",))}
    has_several_sets = isinstance(trainer.eval_dataset, dict)
    calls: dict[str, set[Call]] = {}
    todo: list[tuple[str, int]] = [("train", 0)] + ([("evaluate", 0)] if _evaluates(trainer) else [])
    seen: set[tuple[str, int]] = set()
    while todo:
        name, start = todo.pop()
        place = next((i for i in range(start, len(order)) if name in _methods_in(order[i])), None)
        if place is None or name in never_called or (name, place) in seen:
            continue
        seen.add((name, place))
        for node in _reached(_methods_in(order[place])[name], never_true):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=called)) if called not in never_called:
                    # `evaluate` calls itself only for several evaluation sets.
                    if called != name or has_several_sets:
                        calls.setdefault(called, set()).update(filter(None, [_call_of(node)]))
                case ast.Attribute(value=ast.Name(id="self"), attr=called):
                    todo.append((called, 0))
                case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=called):
                    todo.append((called, place + 1))
    return calls


def _reached(node: ast.AST, never_true: Set[str]) -> Iterator[ast.AST]:
    """Walk through a method, without the branches that a private run never takes."""
    yield node
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.If | ast.IfExp):
        body = node.body if isinstance(node.body, list) else [node.body]
        orelse = node.orelse if isinstance(node.orelse, list) else [node.orelse]
        holds = _holds(node.test, never_true)
        children = [node.test, *(body if holds is not False else ()), *(orelse if holds is not True else ())]
    for child in children:
        yield from _reached(child, never_true)


def _holds(test: ast.expr, never_true: Set[str]) -> bool | None:
    """Return whether a condition holds in a private run, or None if it may or may not."""
    match test:
        case ast.Call(func=function):
            return _holds(function, never_true)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return False if name in never_true else None
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            holds = _holds(operand, never_true)
            return None if holds is None else not holds
        case ast.BoolOp(op=operator, values=values):
            decides = isinstance(operator, ast.Or)  # a part with this value decides the whole condition
            parts = [_holds(value, never_true) for value in values]
            if decides in parts:
                return decides
            return None if None in parts else not decides
    return None
