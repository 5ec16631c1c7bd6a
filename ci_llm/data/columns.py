"""The columns of a data set as the parts of a row: found by their names, or named by the configuration.

Form                    columns                                          becomes
tokens                  input_ids, labels may be missing                 Tokens
messages                messages, conversations: lists of turns          Chat
prompt + completion     two strings, or two lists of messages            Completion, or Chat trained on its end
question + answer       two strings, under the names that people use;    Chat
                        context, history and system may be missing
instruction + output    input, history and system may be missing         Chat
SQuAD                   context, question, answers.text                  Chat of two messages
text                    a string                                         Completion of nothing
prompt + chosen +       two answers, strings or lists of messages; the    Pair
rejected                prompt may be the turns that both begin with;
                        margin: a number
prompt + completion +   as prompt + completion; label: good or not        Rated
label
text + label            a text or a chat; label: a class, or a number     Labelled

The forms of `_EXACT` come first, by these very names; then names in any case, with spaces around them, and the other
names of `_ANY_CASE`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from shlex import quote
from typing import TYPE_CHECKING, Any, Final

from ci_llm.config.parsing import nearest
from ci_llm.data.rows import (
    NOT_LEARNED,
    ROLES,
    Chat,
    Completion,
    Form,
    Labelled,
    Message,
    Pair,
    Rated,
    RawRow,
    Row,
    Tokens,
    messages_of,
    numbers_of,
    text_of,
    tools_of,
)
from ci_llm.errors import DataError

if TYPE_CHECKING:
    from ci_llm.objectives import RowKind

# ------------------------------------------------------------------------------------------- parts to rows


def _chat(messages: tuple[Message, ...], trained_from: int = 0, tools: tuple[Any, ...] = ()) -> Chat | None:
    spoken = [m for m in messages[trained_from:] if m.content.strip() or m.tool_calls]
    if any(m.role == "assistant" and m.learned for m in spoken):
        return Chat(messages, trained_from, tools)
    for role in dict.fromkeys(m.role for m in spoken if m.role not in ROLES):
        # Templates may know other roles, so that only one which hides the answer is refused.
        meant = nearest(role, ROLES) or ""
        if ROLES.get(meant) == "assistant":
            raise ValueError(f"no turn is of the assistant, and the role {role!r} may be a misspelt {meant!r}")
    return None


def _system(row: RawRow) -> tuple[Message, ...]:
    text = text_of(row.get("system"))
    return (Message("system", text),) if text.strip() else ()


def _read_messages(row: RawRow) -> Row | None:
    messages = messages_of(row["messages"])
    if not messages or messages[0].role != "system":
        messages = (*_system(row), *messages)
    return _chat(messages, tools=tools_of(row.get("tools")))


def _read_completion(row: RawRow) -> Row | None:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, list):
        given = messages_of(prompt)
        return _chat((*given, *messages_of(completion)), len(given), tools_of(row.get("tools")))
    return Completion(text_of(prompt), text_of(completion)) if text_of(completion).strip() else None


def _read_pair(row: RawRow) -> Row | None:
    """A prompt, with its context and input, and its answer; both may be messages."""
    prompt, answer = row["prompt"], row["answer"]
    if isinstance(prompt, list):
        given = messages_of(prompt)
        last = messages_of(answer) if isinstance(answer, list) else (Message("assistant", text_of(answer)),)
        return _chat((*given, *last), len(given))
    parts = (text_of(row.get("context")), text_of(prompt), text_of(row.get("input")))
    asked = "\n\n".join(part for part in parts if part)
    if not asked.strip():
        return None
    last = (Message("user", asked), Message("assistant", text_of(answer)))
    if not last[1].content.strip():
        return None
    return _chat((*_system(row), *_history(row.get("history")), *last))


def _history(value: Any) -> tuple[Message, ...]:
    """Earlier turns: Alpaca's pairs of what was asked and answered, or messages."""
    if not isinstance(value, list) or not all(isinstance(turn, list) for turn in value):
        return messages_of(value)
    if any(len(turn) != 2 for turn in value):
        raise ValueError(f"expected a history of pairs, found {str(value)[:60]}")
    pairs = [(Message("user", text_of(asked)), Message("assistant", text_of(said))) for asked, said in value]
    return tuple(message for pair in pairs for message in pair)


def _read_preference(row: RawRow) -> Row | None:
    """Two answers to what is asked. Where they are messages, the turns that both begin with belong to the prompt."""
    prompt, answers = row.get("prompt"), (row["chosen"], row["rejected"])
    if not any(isinstance(part, list) for part in (prompt, *answers)):
        chosen, rejected = map(text_of, answers)
        if not chosen.strip() or not rejected.strip() or chosen == rejected:
            return None
        if prompt is None:
            raise ValueError(
                "chosen and rejected are text, and no column holds their prompt; objective=sft with"
                " text_column=chosen learns the better texts as they are"
            )
        return Pair(Completion(text_of(prompt), chosen), Completion(text_of(prompt), rejected), _margin(row))
    said = [messages_of(each) if isinstance(each, list) else _said(each) for each in answers]
    if not all(said) or said[0] == said[1]:
        return None
    if said[0][0].role == "assistant" and prompt is not None:
        given = messages_of(prompt) if isinstance(prompt, list) else (Message("user", text_of(prompt)),)
        begin, said = len(given), [(*given, *each) for each in said]
    else:
        differ = [first != second for first, second in zip(*said, strict=False)]
        begin = differ.index(True) if True in differ else len(differ)
    system = () if said[0][0].role == "system" else _system(row)
    tools = tools_of(row.get("tools"))
    better, worse = (_chat((*system, *each), len(system) + begin, tools) for each in said)
    return Pair(better, worse, _margin(row)) if better and worse else None


def _margin(row: RawRow) -> float | None:
    """The margin by which people prefer the chosen answer; None without one."""
    if (margin := row.get("margin")) is None:
        return None
    if not isinstance(margin, int | float) or not math.isfinite(margin):
        raise ValueError(f"expected a margin that is a finite number, found {str(margin)[:60]!r}")
    return float(margin)


def _said(text: Any) -> tuple[Message, ...]:
    """An answer in text, as the message that it is."""
    return (Message("assistant", text_of(text)),) if text_of(text).strip() else ()


def _read_rated(row: RawRow) -> Row | None:
    found, label = _read_completion(row), row["label"]
    label = label.strip().lower() if isinstance(label, str) else label
    if found is None or label is None or label == "":
        return None
    if label not in _GOOD:
        raise ValueError(f"expected a label that is true or false, found {str(label)[:60]!r}")
    return Rated(found, _GOOD[label])  # type: ignore[arg-type]


def _read_labelled(row: RawRow) -> Row | None:
    text, label = row["text"], row["label"]
    found: Chat | Completion = (
        Chat(messages_of(text), tools=tools_of(row.get("tools")))
        if isinstance(text, list)
        else Completion(None, text_of(text))
    )
    said = found.messages if isinstance(found, Chat) else found.completion.strip()
    if not said or label is None or label == "" or label != label:
        return None
    if not isinstance(label, str | int | float):
        raise ValueError(f"expected one label, found {str(label)[:60]}")
    return Labelled(found, label)


#: Labels of rated rows; 1 and 0 are equal to true and false.
_GOOD: Final[Mapping[Any, bool]] = {True: True, False: False, "true": True, "false": False, "1": True, "0": False}


def _read_squad(row: RawRow) -> Row | None:
    answers = row["answers"]
    texts = answers.get("text") if isinstance(answers, Mapping) else answers
    if texts is not None and not isinstance(texts, list):
        raise ValueError(f"expected answers.text to be a list, found {type(texts).__name__}")
    asked = f"{text_of(row['context'])}\n\n{text_of(row['prompt'])}"
    turns = Message("user", asked), Message("assistant", text_of(texts[0]) if texts else "")
    return _chat(turns) if asked.strip() else None


def _read_text(row: RawRow) -> Row | None:
    text = text_of(row["text"])
    return Completion(None, text) if text.strip() else None


def _read_tokens(row: RawRow) -> Row | None:
    """Token ids without their pads; labels are the ids, or -100 where nothing is learned."""
    ids = numbers_of(row["input_ids"]) or []
    kept = [bool(flag) for flag in numbers_of(row.get("attention_mask")) or [1] * len(ids)]
    labels = numbers_of(row.get("labels"))
    if len(kept) != len(ids) or (labels is not None and len(labels) != len(ids)):
        raise ValueError(f"{len(ids)} input_ids, {len(kept)} in attention_mask, {len(labels or ids)} labels")
    odd = [(i, one) for i, one in zip(ids, labels or (), strict=False) if one not in (i, NOT_LEARNED)]
    if odd:
        raise ValueError(f"label {odd[0][1]} stands at token {odd[0][0]}; a label is the token itself or {NOT_LEARNED}")
    given = tuple(token for token, keep in zip(ids, kept, strict=True) if keep)
    if labels is None:
        return Tokens(given) if given else None
    learned = tuple(label for label, keep in zip(labels, kept, strict=True) if keep)
    return Tokens(given, learned) if any(label != NOT_LEARNED for label in learned) else None


# ------------------------------------------------------------------------------------------ columns to parts

Names = Mapping[str, Sequence[str]]


def plain(name: str) -> str:
    """The name of a column without its case, and without the spaces around it."""
    return name.strip().lower()


_PROMPTS = ("prompt", "question", "query", "instruction", "problem", "input", "user", "context", "source")
_ANSWERS = ("completion", "response", "answer", "output", "solution", "assistant", "reply", "target")
_TEXTS = ("text", "content", "completion", "document", "story")
_MESSAGES = ("messages", "conversations", "conversation", "dialogue", "dialog", "chat")
_WITH_CHAT = {"tools": ("tools",), "system": ("system", "system_prompt")}
_WITH_TOKENS = {"labels": ("labels",), "attention_mask": ("attention_mask",)}
_WITH_PAIR = {"history": ("history",), "system": ("system", "system_prompt")}


@dataclass(frozen=True)
class _Pattern:
    """A form before its columns are known: for each part the names that it may have, the first is taken."""

    name: str
    reader: Callable[[RawRow], Row | None]
    needs: Names
    may_have: Names = field(default_factory=dict)
    kind: RowKind = "single"

    def found_in(self, columns: Sequence[str], *, any_case: bool) -> Form | None:
        """The form with the columns that are there, if every part that it needs is."""
        by_name = {(plain(column) if any_case else column): column for column in reversed(columns)}
        found: dict[str, str] = {}
        for part, names in {**self.needs, **self.may_have}.items():
            free = (by_name[name] for name in names if name in by_name and by_name[name] not in found.values())
            if (column := next(free, None)) is not None:
                found[part] = column
            elif part in self.needs:
                return None
        return Form(self.name or " + ".join(found[part] for part in self.needs), found, self.reader, self.kind)


_TOKENS_FORM = _Pattern("tokens", _read_tokens, {"input_ids": ("input_ids",)}, _WITH_TOKENS)
_EXACT_PAIRS: Final = (
    _Pattern(
        "prompt + completion",
        _read_completion,
        {"prompt": ("prompt",), "completion": ("completion",)},
        {"tools": ("tools",)},
    ),
    _Pattern(
        "question + answer",
        _read_pair,
        {"prompt": ("question",), "answer": ("answer",)},
        {"context": ("context",), **_WITH_PAIR},
    ),
    _Pattern(
        "instruction + output",
        _read_pair,
        {"prompt": ("instruction",), "answer": ("output",)},
        {"input": ("input",), **_WITH_PAIR},
    ),
    _Pattern("SQuAD", _read_squad, {"context": ("context",), "prompt": ("question",), "answers": ("answers",)}),
)
_EXACT: Final = (
    _TOKENS_FORM,  # first, because a tokenised data set often keeps the columns that it was made of
    _Pattern("messages", _read_messages, {"messages": ("messages",)}, _WITH_CHAT),
    _Pattern("conversations", _read_messages, {"messages": ("conversations",)}, _WITH_CHAT),
    *_EXACT_PAIRS,
    _Pattern("text", _read_text, {"text": ("text",)}),
)
_ANY_CASE: Final = (
    _Pattern("messages", _read_messages, {"messages": _MESSAGES}, _WITH_CHAT),
    *_EXACT_PAIRS,
    _Pattern(
        "", _read_pair, {"prompt": ("instruction",), "answer": _ANSWERS}, {"input": ("input", "context"), **_WITH_PAIR}
    ),
    _Pattern(
        "",
        _read_pair,
        {"prompt": _PROMPTS, "answer": _ANSWERS},
        {"input": ("input",), "context": ("context",), **_WITH_PAIR},
    ),
    _TOKENS_FORM,
    _Pattern("text", _read_text, {"text": _TEXTS}),
)

_PAIRS_FORM: Final = _Pattern(
    "",
    _read_preference,
    {"chosen": ("chosen",), "rejected": ("rejected",)},
    {"prompt": _PROMPTS, "margin": ("margin",), **_WITH_CHAT},
    "pairs",
)
_RATED_FORM: Final = _Pattern(
    "",
    _read_rated,
    {"prompt": ("prompt",), "completion": ("completion",), "label": ("label",)},
    {"tools": ("tools",)},
    "rated",
)

_LABELLED_FORM: Final = _Pattern(
    "",
    _read_labelled,
    {"text": ("text", "sentence", "messages"), "label": ("label", "labels")},
    {"tools": ("tools",)},
    "labelled",
)

#: The forms of rows that are not answers to learn, the columns that each takes, and the keys that name others.
_JUDGED: Final[Mapping[RowKind, tuple[_Pattern, str, str]]] = {
    "pairs": (_PAIRS_FORM, "prompt, chosen and rejected", "prompt_column= names another prompt"),
    "rated": (_RATED_FORM, "prompt, completion and label", "prompt_column= and label_column= name others"),
    "labelled": (_LABELLED_FORM, "text and label", "text_column= (or messages_column=) and label_column= name others"),
}

#: What the error lists when nothing fits.
_WANTED: Final = (
    "input_ids; messages; conversations; prompt, completion; question, answer; instruction, output; "
    "context, question, answers; text; prompt, chosen, rejected; prompt, completion, label; text, label"
)


def find_form(columns: Sequence[str]) -> Form | None:
    """The first form whose columns are all there: by today's very names first, then in any case, by other names.

    Raises:
        ValueError: the columns are preference pairs.
    """
    exact = (pattern.found_in(columns, any_case=False) for pattern in _EXACT)
    if (form := next(filter(None, exact), None)) is not None:
        return form
    if _PAIRS_FORM.found_in(columns, any_case=True):
        raise ValueError("the columns chosen and rejected are preference pairs, and objective sft learns answers")
    return next(filter(None, (pattern.found_in(columns, any_case=True) for pattern in _ANY_CASE)), None)


#: Columns, in lower case, by which rows are told that are not made for learning their answers, and what they are.
_NOT_ANSWERS: Final = (
    ({"prompt", "completion", "label"}, "answers with a label each, right or wrong, which objective=kto takes"),
    ({"question", "choices"}, "questions with choices"),
    ({"question", "options"}, "questions with choices"),
    ({"ctx", "endings"}, "beginnings with a choice of endings"),
    ({"text", "label"}, "texts with a class or a number each, which objective=classification and regression take"),
    ({"text", "labels"}, "texts with a class or a number each, which objective=classification and regression take"),
    *(({name}, "pictures or sounds") for name in ("image", "images", "audio", "audios", "video", "videos")),
)


def _require_answers(columns: Sequence[str], where: str) -> None:
    """Refuse rows that would be learned otherwise than they are meant, because some of their columns are not read."""
    by_name = {plain(column): column for column in columns}
    for wanted, what in _NOT_ANSWERS:
        if wanted <= by_name.keys() and "input_ids" not in by_name:
            dropped = by_name[(wanted - {"prompt", "completion", "question", "ctx", "text"}).pop()]
            raise DataError(
                f"The data set looks like {what}, and {dropped} would not be read.",
                where=where,
                hint=f"name the columns to train without {dropped}: prompt_column= and answer_column=, text_column= or"
                " messages_column=",
            )


def form_of_columns(
    columns: Sequence[str], named: Mapping[str, str], where: str, wanted: RowKind | None = "single"
) -> Form:
    """How a data set with these columns is read.

    Args:
        named: the columns that the configuration names, by their part; the others are found.
        wanted: what the objective takes; None: what the columns are, if they are not those of single rows.

    Raises:
        DataError: a named column is not there, no form fits, or the rows are meant for another objective.
    """
    given = {**named}
    if wanted is not None and wanted in _JUDGED:
        return _judged_form(columns, given, where, wanted)
    if "label" in given and wanted is None:
        return _judged_form(columns, given, where, "labelled")
    given.pop("label", None)
    if given:
        return _named_form(columns, given, where)
    if wanted is None and (judged := _unless_answers(columns)):
        return judged
    _require_answers(columns, where)
    try:
        form = find_form(columns)
    except ValueError as error:
        raise DataError(
            f"The data set cannot be trained on: {error}.", where=where, hint=_better_answers(columns)
        ) from error
    if form is None:
        what = f"The data set has no columns that can be used; it has: {shown(columns)}."
        raise DataError(what, where=where, hint=_advice(columns, where))
    return form


def _unless_answers(columns: Sequence[str]) -> Form | None:
    """The form of pairs, rated or labelled rows, where single rows would be refused."""
    for pattern in (_RATED_FORM, _LABELLED_FORM):
        if labelled := pattern.found_in(columns, any_case=True):
            return None if "input_ids" in map(plain, columns) else labelled
    exact = (pattern.found_in(columns, any_case=False) for pattern in _EXACT)
    return None if any(exact) else _PAIRS_FORM.found_in(columns, any_case=True)


def _judged_form(columns: Sequence[str], given: Mapping[str, str], where: str, wanted: RowKind) -> Form:
    """The form of pairs, rated or labelled rows, whose prompt, text or label may be named."""
    _require_named(columns, given, where)
    pattern, wants, way = _JUDGED[wanted]
    parts = {"text" if part == "messages" and wanted == "labelled" else part: name for part, name in given.items()}
    known = {part: (plain(name),) for part, name in parts.items()}
    others = {part: names for part, names in pattern.may_have.items() if part not in known}
    form = None
    if known.keys() <= {*pattern.needs, *pattern.may_have}:
        form = replace(pattern, needs={**pattern.needs, **known}, may_have=others).found_in(columns, any_case=True)
    has_pictures = any(plain(name) in ("image", "images") for name in columns)
    if form is None or has_pictures:
        raise DataError(
            f"The objective takes {wants}, and the data set has: {shown(columns)}.",
            where=where,
            hint=f"{way}; or rename the columns, or take objective=auto, which goes by them"
            f"{'; pictures are not learned here' * has_pictures}",
        )
    return form


def _better_answers(columns: Sequence[str]) -> str:
    """How to train on the better answers of preference pairs that have these columns."""
    by_name = {plain(column): column for column in columns}
    chosen = by_name["chosen"]
    prompt = next((by_name[name] for name in _PROMPTS if name in by_name), None)
    of_text = f"prompt_column={prompt} answer_column={chosen}" if prompt else f"text_column={chosen}"
    return (
        f"objective=dpo compares the two; or train on the better answers: {of_text} if {chosen} holds text,"
        f" messages_column={chosen} if it holds messages"
    )


def _advice(columns: Sequence[str], where: str) -> str:
    """The hint for columns of which no form is made."""
    of_splits = ".json" in where and {"data", "train"} & {*columns}
    first = (
        "remove the other keys of a JSON object of splits: each must hold a list of rows; else " if of_splits else ""
    )
    prompt, answer = columns if len(columns) == 2 and not of_splits else ("", "")
    typed = " and ".join(quote(f"{key}={name}") for key, name in (("prompt_column", prompt), ("answer_column", answer)))
    named = f"{first}say {typed}, text_column= or messages_column=, with label_column= for classes or numbers"
    more = "; the first line of a CSV file holds the names of its columns" if ".csv" in where else ""
    return f"{named}, or have one of: {_WANTED}{more}"


def shown(columns: Sequence[str]) -> str:
    """The names of columns; of an object whose keys are rows, the first ones."""
    more = f", ... ({len(columns)} in all)" if len(columns) > 20 else ""
    return ", ".join(columns[:20]) + more


def _require_named(columns: Sequence[str], given: Mapping[str, str], where: str) -> None:
    """Refuse names of columns that the data set does not have."""
    there = {plain(column) for column in columns}
    for part, name in given.items():
        if plain(name) not in there:
            what = f"The data set has no column {name!r}; it has: {shown(columns)}."
            raise DataError(what, where=f"{where}, {part}_column: {name}", hint=f"set {part}_column to one of them")


def _named_form(columns: Sequence[str], given: Mapping[str, str], where: str) -> Form:
    _require_named(columns, given, where)
    if len({*given.values()}) < len(given):
        raise DataError(
            f"prompt_column and answer_column are the same column, {given['prompt']!r}.",
            where=where,
            hint=f"name two columns, or text_column={given['prompt']} to learn all of its text",
        )
    # Columns that are named in their own case come first: of `Text` and `text` the named one is meant.
    preferred = sorted(columns, key=lambda column: column not in given.values())
    form = _pattern_of({part: plain(name) for part, name in given.items()}).found_in(preferred, any_case=True)
    if form is None:
        missing = "answer" if "prompt" in given else "prompt"
        what = f"No column goes with {', '.join(given.values())}; the data set has: {shown(columns)}."
        raise DataError(what, where=where, hint=f"name it by {missing}_column=")
    return form


def _pattern_of(names: Mapping[str, str]) -> _Pattern:
    """The form that named columns mean; of a question and its answer, one may be found by its name."""
    if "messages" in names:
        return _Pattern("messages", _read_messages, {"messages": (names["messages"],)}, _WITH_CHAT)
    if "text" in names:
        return _Pattern("text", _read_text, {"text": (names["text"],)})
    known = {part: (name,) for part, name in names.items()}
    others = {part: usual for part, usual in (("prompt", _PROMPTS), ("answer", _ANSWERS)) if part not in known}
    return _Pattern("", _read_pair, {**known, **others}, _WITH_PAIR)
