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
prompt + chosen +       two answers, strings or messages; the prompt      Pair
rejected                may be a question, instruction or conversation
                        with what stands beside it, or the turns that
                        both begin with; margin: a number
prompt + completion +   as prompt + completion, or messages whose last    Rated
label, or kto_tag       answer is meant; label: good or not
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
    if not _is_text(row, completion):
        return _read_pair({**row, "answer": completion})
    return Completion(text_of(prompt), text_of(completion)) if text_of(completion).strip() else None


def _is_text(row: RawRow, *answers: Any) -> bool:
    """Whether prompt and answers are text that no chat template touches; a column beside the prompt makes it a chat."""
    if any(map(_are_turns, (row.get("prompt"), *answers))) or _OF_CHATS & row.keys():
        return False
    if tools_of(row.get("tools")):
        raise ValueError("tools stand beside a prompt of text, which no chat template touches; give it as messages")
    return True


def _are_turns(value: Any) -> bool:
    """Whether a cell holds messages, or a single one, and no text."""
    turns = value if isinstance(value, list) else [value]
    return any(isinstance(turn, Mapping) and {"role", "from", "messages"} & turn.keys() for turn in turns)


def _read_pair(row: RawRow) -> Row | None:
    """A prompt, with its context and input, and its answer; both may be messages."""
    given, answer = _asked(row), _said(row["answer"])
    begin = len(given) if _are_turns(row["prompt"]) else 0
    return _chat((*given, *answer), begin, _tools(row)) if given and answer else None


def _asked(row: RawRow) -> tuple[Message, ...]:
    """What is asked: system text, earlier turns and the prompt, with its context and its input; empty without one."""
    prompt = _turns(row.get("prompt"))
    if _are_turns(prompt):
        if beside := [part for part in ("context", "input", "history") if row.get(part)]:
            raise ValueError(f"{beside[0]} stands beside a prompt of messages; write it into one of them")
        turns = messages_of(prompt)
    else:
        asked = "\n\n".join(filter(None, map(text_of, (row.get("context"), prompt, row.get("input")))))
        turns = (*_history(row.get("history")), Message("user", asked)) if asked.strip() else ()
    return turns if not turns or turns[0].role == "system" else (*_system(row), *turns)


def _turns(prompt: Any) -> Any:
    """A prompt, of which OpenAI's pairs have messages and tools in an object."""
    if not isinstance(prompt, Mapping):
        return prompt
    if odd := {key for key, value in prompt.items() if value} - {"messages", "tools", "parallel_tool_calls"}:
        raise ValueError(
            f"a prompt that is an object has messages and tools, and this one has {', '.join(sorted(odd))}"
        )
    return prompt.get("messages") or []


def _tools(row: RawRow) -> tuple[Any, ...]:
    prompt = row.get("prompt")
    return tools_of(row.get("tools") or (prompt.get("tools") if isinstance(prompt, Mapping) else None))


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
    if _is_text(row, *answers):
        chosen, rejected = map(text_of, answers)
        if not chosen.strip() or not rejected.strip() or chosen == rejected:
            return None
        if prompt is None:
            raise ValueError(
                "chosen and rejected are text, and no column holds their prompt; objective=sft with"
                " text_column=chosen learns the better texts as they are"
            )
        return Pair(Completion(text_of(prompt), chosen), Completion(text_of(prompt), rejected), _margin(row))
    said, given = [*map(_said, answers)], _asked(row)
    if not all(said) or said[0] == said[1]:
        return None
    if said[0][0].role == "assistant" and given:
        if given[-1].role == "assistant":
            raise ValueError("the prompt ends with an answer, and chosen and rejected are others to the turn before")
        begin, said = len(given), [(*given, *each) for each in said]
    else:
        differ = [first != second for first, second in zip(*said, strict=False)]
        begin = differ.index(True) if True in differ else len(differ)
    system = () if said[0][0].role == "system" else _system(row)
    better, worse = (_chat((*system, *each), len(system) + begin, _tools(row)) for each in said)
    return Pair(better, worse, _margin(row)) if better and worse else None


def _margin(row: RawRow) -> float | None:
    """The margin by which people prefer the chosen answer; None without one."""
    if (margin := row.get("margin")) is None:
        return None
    if not isinstance(margin, int | float) or not math.isfinite(margin):
        raise ValueError(f"expected a margin that is a finite number, found {str(margin)[:60]!r}")
    return float(margin)


def _said(answer: Any) -> tuple[Message, ...]:
    """An answer in text or as messages, of which a single one may stand without a list."""
    if _are_turns(answer):
        return messages_of([answer] if isinstance(answer, Mapping) else answer)
    return (Message("assistant", text_of(answer)),) if text_of(answer).strip() else ()


def _read_rated(row: RawRow) -> Row | None:
    read = _read_pair if "answer" in row else _read_completion if "completion" in row else _read_messages
    found, label = read(row), row["label"]
    label = label.strip().lower() if isinstance(label, str) else label
    if found is None or label is None or label == "":
        return None
    if not isinstance(label, str | int | float) or label not in _GOOD:
        raise ValueError(f"expected a label that is true or false, found {str(label)[:60]!r}")
    if isinstance(found, Chat) and not found.trained_from:
        if found.messages[-1].role != "assistant":
            raise ValueError("the label is of the last answer, and the last message is not of the assistant")
        found = replace(found, trained_from=len(found.messages) - 1)
    return Rated(found, _GOOD[label])  # type: ignore[arg-type]


def _read_labelled(row: RawRow) -> Row | None:
    text, label, tools = row["text"], row["label"], tools_of(row.get("tools"))
    if tools and not isinstance(text, list):
        raise ValueError("tools stand beside a text, which no chat template touches; give it as messages")
    found = Chat(messages_of(text), tools=tools) if isinstance(text, list) else Completion(None, text_of(text))
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
_LABELLED_TEXTS = ("text", "sentence", "messages")
_RATINGS = ("kto_tag", "label")
_LABELS = ("label", "labels")


def _names(*parts: str) -> dict[str, Sequence[str]]:
    """Parts whose columns have their names."""
    return {part: (part,) for part in parts}


_WITH_CHAT: Final = _names("tools") | {"system": ("system", "system_prompt")}
_WITH_TOKENS: Final = _names("labels", "attention_mask")
_WITH_PAIR: Final = _names("history") | _WITH_CHAT
_WITH_PARTS: Final = _names("input", "context") | _WITH_PAIR
#: Parts of a prompt that only a chat can hold beside it.
_OF_CHATS: Final = {"input", "context", "history", "system"}
#: Columns that belong to what is asked: text in one of them that is not read is missing from the prompt.
_OF_PROMPTS: Final = {*_PROMPTS, "history", "tools", *_WITH_CHAT["system"]} - {"user", "source"}


@dataclass(frozen=True)
class _Pattern:
    """A form before its columns are known: for each part the names that it may have, the first is taken."""

    name: str
    reader: Callable[[RawRow], Row | None]
    needs: Names
    may_have: Names = field(default_factory=dict)
    kind: RowKind = "single"

    def with_names(self, known: Names) -> _Pattern:
        """The form whose parts have these columns."""
        return replace(self, needs={**self.needs, **known})

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
    _Pattern("prompt + completion", _read_completion, _names("prompt", "completion"), _WITH_CHAT),
    _Pattern(
        "question + answer", _read_pair, {"prompt": ("question",), **_names("answer")}, _names("context") | _WITH_PAIR
    ),
    _Pattern(
        "instruction + output",
        _read_pair,
        {"prompt": ("instruction",), "answer": ("output",)},
        _names("input") | _WITH_PAIR,
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
    _Pattern("", _read_pair, {"prompt": _PROMPTS, "answer": _ANSWERS}, _WITH_PARTS),
    _TOKENS_FORM,
    _Pattern("text", _read_text, {"text": _TEXTS}),
)

#: LLaMA-Factory's, Axolotl's and OpenAI's pairs among them.
_TWO: Final[Names] = {"chosen": ("chosen", "preferred_output"), "rejected": ("rejected", "non_preferred_output")}
_WITH_TWO: Final = _names("margin") | _WITH_CHAT
_OF_CONVERSATIONS: Final = _Pattern("", _read_preference, {"prompt": ("conversations",), **_TWO}, _WITH_TWO, "pairs")
_PAIRS: Final = (
    _Pattern("", _read_preference, {**_names("prompt"), **_TWO}, _WITH_TWO, "pairs"),
    _OF_CONVERSATIONS,
    _Pattern("", _read_preference, {"prompt": _MESSAGES, **_TWO}, _WITH_TWO, "pairs"),
    _Pattern("", _read_preference, {"prompt": _PROMPTS, **_TWO}, {**_WITH_TWO, **_WITH_PARTS}, "pairs"),
    _Pattern("", _read_preference, _TWO, _WITH_TWO, "pairs"),
)
_RATED: Final = (
    _Pattern("", _read_rated, _names("prompt", "completion") | {"label": _RATINGS}, _WITH_CHAT, "rated"),
    _Pattern("", _read_rated, {"messages": _MESSAGES, "label": ("kto_tag",)}, _WITH_CHAT, "rated"),
    _Pattern("", _read_rated, {"prompt": _PROMPTS, "answer": _ANSWERS, "label": ("kto_tag",)}, _WITH_PARTS, "rated"),
    _Pattern("", _read_rated, {"messages": _MESSAGES, "label": ("label",)}, _WITH_CHAT, "rated"),
)
_LABELLED: Final = (
    _Pattern("", _read_labelled, {"text": _LABELLED_TEXTS, "label": _LABELS}, _names("tools"), "labelled"),
)

#: The forms of rows that are not answers to learn, the columns that each takes, and the keys that name others.
_JUDGED: Final[Mapping[RowKind, tuple[Sequence[_Pattern], str, str]]] = {
    "pairs": (_PAIRS, "prompt, chosen and rejected", "prompt_column= names another prompt"),
    "rated": (_RATED, "prompt, completion and label", "prompt_column= and answer_column= name others"),
    "labelled": (_LABELLED, "text and label", "text_column= and answer_column= name others"),
}

#: How to train on pairs.
_BETTER_ANSWERS: Final = (
    "objective=dpo compares the two; or name the better answers: answer_column=chosen with prompt_column=, or"
    " text_column=chosen"
)
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
    if (form := _first(_EXACT, columns, any_case=False)) is not None:
        return form
    if _first(_PAIRS, columns):
        raise ValueError("the columns chosen and rejected are preference pairs, and objective sft learns answers")
    return _first(_ANY_CASE, columns)


def _first(patterns: Sequence[_Pattern], columns: Sequence[str], *, any_case: bool = True) -> Form | None:
    return next(filter(None, (pattern.found_in(columns, any_case=any_case) for pattern in patterns)), None)


_RATINGS_BESIDE: Final = (
    {"prompt", "completion", "label"},
    {"messages", "label"},
    {"conversations", "label"},
    {"kto_tag"},
)
_PAIRED: Final = (
    {"conversations", "chosen", "rejected"},
    {"preferred_output", "non_preferred_output"},
    *({"rejected_response"}, {"rejected_messages"}),  # ms-swift has the better answer at the end of messages
)
#: Columns, in lower case, by which rows are told that are not made for learning their answers, and what they are.
_NOT_ANSWERS: Final = (
    *((told, "answers with a label each, right or wrong, which objective=kto takes") for told in _RATINGS_BESIDE),
    *((told, "preference pairs, and objective=dpo takes prompt, chosen and rejected") for told in _PAIRED),
    *(({"question", name}, "questions with choices") for name in ("choices", "options")),
    ({"ctx", "endings"}, "beginnings with a choice of endings"),
    *(({"text", name}, "texts with a class or a number, which objective=classification takes") for name in _LABELS),
    *(({name}, "pictures or sounds") for name in ("image", "images", "audio", "audios", "video", "videos")),
)


def _require_answers(columns: Sequence[str], where: str) -> None:
    """Refuse rows that would be learned otherwise than they are meant, because some of their columns are not read."""
    by_name = {plain(column): column for column in columns}
    for wanted, what in _NOT_ANSWERS:
        if wanted <= by_name.keys() and "input_ids" not in by_name:
            dropped = by_name[min(wanted - {"prompt", "completion", "question", "ctx", "text", *_MESSAGES})]
            raise DataError(
                f"The data set looks like {what}, and {dropped} would not be read.",
                where=where,
                hint=f"name the columns to train without {dropped}: prompt_column= and answer_column=, or text_column=",
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
    form = _form_of(columns, {**named}, where, wanted)
    if named or form.reader is _read_tokens:
        return form
    read = {*form.columns.values()} - ({form.columns.get("prompt")} if form.kind == "pairs" else set())
    return replace(form, beside=tuple(name for name in columns if plain(name) in _OF_PROMPTS and name not in read))


def _form_of(columns: Sequence[str], given: dict[str, str], where: str, wanted: RowKind | None) -> Form:
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
        raise DataError(f"The data set cannot be trained on: {error}.", where=where, hint=_BETTER_ANSWERS) from error
    if form is None:
        what = f"The data set has no columns that can be used; it has: {shown(columns)}."
        raise DataError(what, where=where, hint=_advice(columns, where))
    return form


def _unless_answers(columns: Sequence[str]) -> Form | None:
    """The form of pairs, rated or labelled rows, where single rows would be refused."""
    if "input_ids" in map(plain, columns):
        return None
    # Messages with a label are texts with a class, unless the objective says otherwise.
    if judged := _first((*_RATED[:-1], *_LABELLED, _OF_CONVERSATIONS), columns):
        return judged
    return None if _first(_EXACT, columns, any_case=False) else _first(_PAIRS, columns)


def _judged_form(columns: Sequence[str], given: Mapping[str, str], where: str, wanted: RowKind) -> Form:
    """The form of pairs, rated or labelled rows, whose prompt, text or label may be named."""
    _require_named(columns, given, where)
    patterns, wants, way = _JUDGED[wanted]
    parts = {"text" if part == "messages" and wanted == "labelled" else part: name for part, name in given.items()}
    known = {part: (plain(name),) for part, name in parts.items()}
    form = _first([each.with_names(known) for each in patterns if known.keys() <= each.needs.keys()], columns)
    has_pictures = any(plain(name) in ("image", "images") for name in columns)
    if form is None or has_pictures:
        raise DataError(
            f"The objective takes {wants}, and the data set has: {shown(columns)}.",
            where=where,
            hint=f"{way}; or rename the columns, or take objective=auto, which goes by them"
            f"{'; pictures are not learned here' * has_pictures}",
        )
    return form


def _advice(columns: Sequence[str], where: str) -> str:
    """The hint for columns of which no form is made."""
    of_splits = ".json" in where and {"data", "train"} & {*columns}
    first = (
        "remove the other keys of a JSON object of splits: each must hold a list of rows; else " if of_splits else ""
    )
    names = columns if len(columns) == 2 and not of_splits else ("", "")
    named = zip(("prompt_column", "answer_column"), names, strict=True)
    typed = " and ".join(quote(f"{key}={name}") for key, name in named)
    more = "; the first line of a CSV file holds the names of its columns" if ".csv" in where else ""
    others = "or text_column=, with answer_column= for classes or numbers"
    return f"{first}say {typed}, {others}, or have one of: {_WANTED}{more}"


def shown(columns: Sequence[str]) -> str:
    """The names of columns; of an object whose keys are rows, the first ones."""
    more = f", ... ({len(columns)} in all)" if len(columns) > 20 else ""
    return ", ".join(columns[:20]) + more


def _require_named(columns: Sequence[str], given: Mapping[str, str], where: str) -> None:
    """Refuse names of columns that the data set does not have."""
    there = {plain(column) for column in columns}
    for part, name in given.items():
        if plain(name) not in there:
            key = "answer_column" if part == "label" else f"{part}_column"
            what = f"The data set has no column {name!r}; it has: {shown(columns)}."
            raise DataError(what, where=f"{where}, {key}: {name}", hint=f"set {key} to one of them")


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
