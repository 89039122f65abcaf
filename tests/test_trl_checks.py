"""TRL's preparation of private rows shows none of them: not in logs, whatever their words, nor in warnings and errors."""

import copy
import logging
import os
import warnings

import pytest
from datasets import Dataset, Features, Value, concatenate_datasets
from peft import LoraConfig
from transformers import LlamaForCausalLM

from tests.support.refusals import refused

pytest.importorskip("trl", reason="the extra trl is not installed")

import trl
import trl.trainer.dpo_trainer as dpo_module
import trl.trainer.sft_trainer as sft_module

import doppler_hf
from doppler_hf import DopplerDPOConfig, DopplerDPOTrainer, DopplerSFTConfig, DopplerSFTTrainer, trl_checks
from tests.support.chat import arguments_of, chat_tokenizer, conversations, preferences, tiny_llama

SECRET = "xylophone"
NUMBERS = Features({"text": Value("string"), "place": Value("int64"), "number": Value("int64")})
KINDS = {
    "sft": (DopplerSFTTrainer, DopplerSFTConfig, sft_module),
    "dpo": (DopplerDPOTrainer, DopplerDPOConfig, dpo_module),
}
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def nothing_said_before(monkeypatch):
    trl_checks._said.clear()
    type(sft_module.logger).warning_once.cache_clear()
    # With several processes `datasets` puts a copy in its place, which others that hold it do not see.
    monkeypatch.setattr(os, "environ", os.environ)
    monkeypatch.setattr(logging.getLogger("trl"), "propagate", True)


def rows_whose_prompts_end_otherwise(kind):
    """The template below renders a prompt alone in another way, so that TRL leaves all of it out, and logs it."""
    prompt = [[{"role": "user", "content": f"{SECRET} {number}"}] for number in range(24)]
    answers = {name: [[{"role": "assistant", "content": f"{name} {number}"}] for number in range(24)] for name in "ab"}
    names = {"completion": "a"} if kind == "sft" else {"chosen": "a", "rejected": "b"}
    return Dataset.from_dict({"prompt": prompt} | {name: answers[answer] for name, answer in names.items()})


TEMPLATE = (
    "{%- for message in messages %}{%- if messages | length == 1 %}{{ '<|assistant|>' }}{%- endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}{%- endfor %}"
)


def made(tmp_path, kind, data=None, *, template=TEMPLATE, **options):
    trainer, config, _ = KINDS[kind]
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = template
    data = rows_whose_prompts_end_otherwise(kind) if data is None else data
    args = arguments_of(tmp_path / "out", cls=config, bf16=False, **options)
    return trainer(model=tiny_llama(), args=args, train_dataset=data, processing_class=tokenizer)


def logged(caplog):
    return "\n".join(f"{record.getMessage()} {record.exc_text} {record.args}" for record in caplog.records)


@kinds
def test_without_privacy_trl_logs_a_prompt(tmp_path, kind, caplog):
    """Otherwise the tests below would hold nothing."""
    with caplog.at_level(logging.DEBUG):
        made(tmp_path, kind, disable_dp=True, **{"precompute_ref_log_probs": True} if kind == "dpo" else {})
    assert f"{SECRET} 0" in logged(caplog)


@kinds
@pytest.mark.parametrize("processes", [None, 2])
def test_no_prompt_is_logged_in_any_process(tmp_path, kind, processes, caplog, capfd):
    """And a line says where something was not shown, in each process once."""
    handler = logging.StreamHandler()
    logging.getLogger().addHandler(handler)  # what other processes log is read from the console
    try:
        with caplog.at_level(logging.DEBUG):
            made(tmp_path, kind, dataset_num_proc=processes)
    finally:
        logging.getLogger().removeHandler(handler)
    shown = logged(caplog) + "".join(capfd.readouterr())
    assert SECRET not in shown
    assert f"A message from trl.trainer.{kind}_trainer about a row" in shown
    if processes is None:
        assert shown.count("about a row of the data is not shown") == 2  # by caplog, and by the console


def other_words(piece):
    logging.getLogger("elsewhere").critical("A rewritten warning: %s", piece)


def a_warning(piece):
    warnings.warn(f"Careful with {piece}", stacklevel=1)


def an_exception_that_is_logged(piece):
    try:
        raise KeyError(piece)
    except KeyError:
        logging.getLogger("trl").exception("It failed")


def an_adapter(piece):
    logging.LoggerAdapter(logging.getLogger("trl.other"), {}).info(f"[RANK 0] {piece}")


@kinds
@pytest.mark.parametrize("shows", [other_words, a_warning, an_exception_that_is_logged, an_adapter])
def test_no_prompt_is_shown_in_other_words_by_another_logger_or_as_a_warning(
    tmp_path, kind, shows, caplog, capfd, monkeypatch
):
    inner = KINDS[kind][2]._tokenize

    def tokenize(processing_class, text, **options):
        shows(str(text))
        return inner(processing_class, text, **options)

    monkeypatch.setattr(KINDS[kind][2], "_tokenize", tokenize)
    with caplog.at_level(logging.DEBUG), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        made(tmp_path, kind)
    shown = logged(caplog) + "".join(capfd.readouterr()) + "".join(str(each.message) for each in warned)
    assert SECRET not in shown
    names = {other_words: "elsewhere", a_warning: "test_trl_checks.py", an_adapter: "trl.other"}
    assert f"A message from {names.get(shows, 'trl')} about a row" in shown


def test_what_is_logged_between_rows_is_shown(caplog):
    quiet = trl_checks.WithoutWords(lambda row: row)
    with caplog.at_level(logging.INFO):
        quiet({"text": SECRET})
        logging.getLogger("trl").info("a message of no row")
    assert "a message of no row" in logged(caplog)
    assert "not shown" not in logged(caplog)


@kinds
def test_data_sets_are_as_they_were_once_a_trainer_is_made(tmp_path, kind):
    own = Dataset.map
    made(tmp_path, kind, conversations() if kind == "sft" else preferences(), template=chat_tokenizer().chat_template)
    with refused("row-not-prepared"):
        made(tmp_path, kind, template="{{ messages.unknown.content }}")
    assert Dataset.map is own


def test_rows_stay_quiet_in_all_that_follows_from_them(caplog):
    def loud(row, *more):
        logging.getLogger("trl").warning(f"a row: {row}")
        return row if not more else True

    rows = Dataset.from_dict({"text": [SECRET] * 4, "other": range(4)})
    with trl_checks.quiet_rows():
        rows.map(loud).map(loud)
        rows.filter(loud).map(loud, batched=True)
        rows.shuffle(seed=0).select(range(2)).remove_columns("other").map(loud)
        rows.rename_column("other", "number").filter(loud).select_columns("text").map(loud)
        rows.train_test_split(2, seed=0)["train"].map(loud)
        concatenate_datasets([rows, rows]).map(loud)
    assert SECRET not in logged(caplog)
    rows.map(loud)
    assert SECRET in logged(caplog)


# --- errors -----------------------------------------------------------------------------------------------------------


def fails_with_the_row(row):
    raise ValueError(f"cannot read {row['text']}")


def fails_by_a_look_up(row):
    return {"none": "known"}[row["text"]]


def fails_by_a_constant(row):
    raise RuntimeError("This data set has the wrong template.")


def is_no_number(row):
    return {"number": row["text"]}


@pytest.mark.parametrize("processes", [None, 2])
@pytest.mark.parametrize("function", [fails_with_the_row, fails_by_a_look_up, is_no_number])
def test_an_error_shows_no_row(function, processes):
    rows = Dataset.from_dict({"text": [f"{SECRET} {place}" for place in range(8)], "place": range(8)})
    with (
        refused("row-not-prepared", match=r"\w+ in [\w.]+ \([\w.]+, line \d+\)") as raised,
        trl_checks.quiet_rows(),
    ):
        rows.map(function, num_proc=processes, features=NUMBERS)
    error = raised.value
    assert SECRET not in str(error)
    assert error.__suppress_context__
    assert SECRET not in str(error.__cause__)


@pytest.mark.parametrize("processes", [None, 2])
def test_an_error_in_the_words_of_the_code_is_shown(processes):
    rows = Dataset.from_dict({"text": [SECRET] * 4})
    with pytest.raises(RuntimeError, match="wrong template"), trl_checks.quiet_rows():
        rows.map(fails_by_a_constant, num_proc=processes)


def test_a_column_that_is_missing_is_named():
    rows = Dataset.from_dict({"prompt": [f"{SECRET} {place}" for place in range(24)]})
    with trl_checks.quiet_rows(), pytest.raises(KeyError, match="completion"):
        rows.map(lambda row: {"text": row["completion"]})


# --- logs -------------------------------------------------------------------------------------------------------------


@kinds
def test_figures_of_training_batches_are_not_logged(tmp_path, kind):
    trainer = made(
        tmp_path, kind, conversations() if kind == "sft" else preferences(), template=chat_tokenizer().chat_template
    )
    trainer._metrics["train"]["mean_token_accuracy"].append(0.25)
    trainer.model.train()
    trainer.log({"own": 1.0})
    assert "own" in trainer.state.log_history[-1]
    assert "mean_token_accuracy" not in trainer.state.log_history[-1]
    trainer.train()
    public = {
        "loss",
        "grad_norm",
        "learning_rate",
        "epsilon",
        "epsilon_planned",
        "epoch",
        "step",
        "own",
        "train_loss",
        "total_flos",
    }
    clocks = {"train_runtime", "train_samples_per_second", "train_steps_per_second"}
    assert set().union(*trainer.state.log_history) <= public | clocks


class OfPlaces:
    """A tokenizer's folder whose chat template has tokens that the model's own tokenizer does not have."""

    def __init__(self, folder):
        self.folder = str(folder / "chat")
        other = chat_tokenizer()
        other.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>", "<|system|>", "<|new|>"]})
        other.chat_template = other.chat_template.replace("{{ '<|' +", "{{ '<|new|><|' +")
        other.save_pretrained(self.folder)


def tied_llama():
    config = copy.deepcopy(tiny_llama().config)
    config.tie_word_embeddings = True
    return LlamaForCausalLM(config)


def of_template(folder, path, *, targets=("q_proj", "v_proj"), model=None, tokenizer=None):
    return DopplerSFTTrainer(
        model=tied_llama() if model is None else model,
        args=arguments_of(folder / "out", cls=DopplerSFTConfig, chat_template_path=path),
        train_dataset=conversations(),
        processing_class=tokenizer or chat_tokenizer(),
        peft_config=LoraConfig(r=2, target_modules=[*targets]),
    )


@pytest.mark.filterwarnings("ignore")  # PEFT's and TRL's, on tied heads and new tokens
def test_new_tokens_of_a_tied_head_are_refused_when_the_trainer_is_made_and_what_is_said_trains(tmp_path):
    places = OfPlaces(tmp_path)
    with refused("shared-parameters", match=r"trl\.clone_chat_template\(model, tokenizer, PATH\)"):
        of_template(tmp_path, places.folder)
    model, tokenizer, _ = trl.clone_chat_template(tied_llama(), chat_tokenizer(), places.folder)
    mended = of_template(tmp_path, None, targets=("q_proj", "embed_tokens"), model=model, tokenizer=tokenizer)
    mended.train()
    assert mended.state.global_step == 2
    template = tmp_path / "template.jinja"
    template.write_text(chat_tokenizer().chat_template)
    with_a_file = of_template(tmp_path / "other", str(template))
    with_a_file.train()
    assert with_a_file.state.global_step == 2


@pytest.mark.filterwarnings("ignore")
def test_kto_says_what_trains_wherever_it_is_met(tmp_path):
    options = dict(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    for name in ("DopplerKTOTrainer", "DopplerKTOConfig"):
        with refused("no-kto", match="DopplerDPOTrainer on pairs"):
            getattr(doppler_hf, name)
    with refused("no-kto"):
        from doppler_hf import DopplerKTOTrainer  # noqa: F401
    for cls in (doppler_hf.DopplerTrainer, DopplerDPOTrainer, DopplerSFTTrainer):
        with refused("no-kto", match="DopplerSFTTrainer on the good answers"):
            cls(model=tiny_llama(), args=trl.KTOConfig(**options), train_dataset=preferences())
    # What the message names trains elsewhere: tests/end_to_end/test_dpo.py and test_sft.py.
