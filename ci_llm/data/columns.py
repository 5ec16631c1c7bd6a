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
prompt                  as above, or messages, whose answer at the end    Prompted
                        is left out; rewards read the other columns

`_DIALECTS` has the columns of each in full. They are recognised in any case, and with spaces around them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from shlex import quote
from typing import TYPE_CHECKING, Any, Final

from ci_llm.config.parsing import nearest
from ci_llm.data.cells import ROLES, messages_of, numbers_of, text_of, tools_of
from ci_llm.data.rows import NOT_LEARNED, Chat, Completion, Form, Labelled, Message, Pair, Prompted, Rated, Tokens
from ci_llm.errors import DataError

if TYPE_CHECKING:
    from ci_llm.data.rows import RawRow, Row
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


def _after_system(row: RawRow, turns: tuple[Message, ...]) -> tuple[Message, ...]:
    """Turns after the system text that stands beside them; unless there are none, or they begin with a system turn."""
    text = text_of(row.get("system"))
    return (Message("system", text), *turns) if turns and turns[0].role != "system" and text.strip() else turns


def _read_messages(row: RawRow) -> Row | None:
    return _chat(_after_system(row, messages_of(row["messages"])), tools=tools_of(row.get("tools")))


def _read_completion(row: RawRow) -> Row | None:
    prompt, completion = row["prompt"], row["completion"]
    if not _is_text(row, completion):
        return _read_pair({**row, "answer": completion})
    return Completion(text_of(prompt), text_of(completion)) if text_of(completion).strip() else None


def _is_text(row: RawRow, *answers: Any) -> bool:
    """True if prompt and answers are text that no chat template touches; a column beside the prompt makes it a chat."""
    if any(map(_are_turns, (row.get("prompt"), *answers))) or _OF_CHATS & row.keys():
        return False
    if tools_of(row.get("tools")):
        raise ValueError("tools stand beside a prompt of text, which no chat template touches; give it as messages")
    return True


def _are_turns(value: Any) -> bool:
    """True if a cell holds messages, or a single one, and no text."""
    turns = value if isinstance(value, list) else [value]
    return any(isinstance(turn, Mapping) and {"role", "from"} & turn.keys() for turn in turns)


def _read_pair(row: RawRow) -> Row | None:
    """A prompt, with its context and input, and its answer; both may be messages."""
    given, answer = _asked(row), _said(row["answer"])
    begin = len(given) if _are_turns(row["prompt"]) else 0
    return _chat((*given, *answer), begin, tools_of(row.get("tools"))) if given and answer else None


def _asked(row: RawRow) -> tuple[Message, ...]:
    """What is asked: system text, earlier turns and the prompt, with its context and its input; empty without one."""
    prompt = row.get("prompt")
    if _are_turns(prompt):
        if beside := [part for part in ("context", "input", "history") if row.get(part)]:
            raise ValueError(f"{beside[0]} stands beside a prompt of messages; write it into one of them")
        turns = messages_of(prompt)
    else:
        asked = "\n\n".join(filter(None, map(text_of, (row.get("context"), prompt, row.get("input")))))
        turns = (*_history(row.get("history")), Message("user", asked)) if asked.strip() else ()
    return _after_system(row, turns)


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
        begin = len(given)
        said = [(*given, *each) for each in said]
    else:
        differ = [first != second for first, second in zip(*said, strict=False)]
        begin = differ.index(True) if True in differ else len(differ)
    whole = [_after_system(row, each) for each in said]
    begin += len(whole[0]) - len(said[0])
    better, worse = (_chat(each, begin, tools_of(row.get("tools"))) for each in whole)
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
    found, label = _read_unlabelled(row), row["label"]
    if found is None or label is None or label == "" or label != label:
        return None
    if not isinstance(label, str | int | float):
        raise ValueError(f"expected one label, found {str(label)[:60]}")
    return Labelled(found, label)


def _read_unlabelled(row: RawRow) -> Chat | Completion | None:
    """A text, or a chat of whatever turns; None for an empty one."""
    text, tools = row["text"], tools_of(row.get("tools"))
    if isinstance(text, list):
        return Chat(turns, tools=tools) if (turns := messages_of(text)) else None
    if tools:
        raise ValueError("tools stand beside a text, which no chat template touches; give it as messages")
    return Completion(None, text_of(text)) if text_of(text).strip() else None


def _read_prompted(row: RawRow) -> Row | None:
    """What is asked, without an answer; a prompt of text is a text that goes on, whatever else stands in the row."""
    if "messages" in row:
        turns = messages_of(row["messages"])
        while turns and turns[-1].role == "assistant":
            turns = turns[:-1]
        turns = _after_system(row, turns)
    elif "text" in row and _is_text({**row, "prompt": row["text"]}):
        text = text_of(row["text"])
        return Prompted(Completion(None, text)) if text.strip() else None
    else:
        turns = _asked({"prompt": row.get("text"), **row})
    if not any(turn.content.strip() for turn in turns):
        return None
    if turns[-1].role == "assistant":
        raise ValueError("the prompt ends with an answer, and agents answer a turn of the user")
    return Prompted(Chat(turns, len(turns), tools_of(row.get("tools"))))


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
#: No column is named otherwise.
_ALL_FOUND: Final[Names] = {}


def plain(name: str) -> str:
    """The name of a column without its case, and without the spaces around it."""
    return name.strip().lower()


#: Names that several columns of one meaning have, in the order in which they are taken.
_NAMES: Final[Names] = {
    "PROMPTS": ("prompt", "question", "query", "instruction", "problem", "input", "user", "context", "source"),
    "ANSWERS": ("completion", "response", "answer", "output", "solution", "assistant", "reply", "target"),
    "TEXTS": ("text", "content", "completion", "document", "story"),
    "MESSAGES": ("messages", "conversations", "conversation", "dialogue", "dialog", "chat"),
}
#: Columns that belong to what is asked: text in one of them that is not read is missing from the prompt.
_OF_PROMPTS: Final = {*_NAMES["PROMPTS"], "history", "tools", "system", "system_prompt"} - {"user", "source"}
#: Parts of a prompt that only a chat can hold beside it.
_OF_CHATS: Final = {"input", "context", "history", "system"}


@dataclass(frozen=True)
class _Dialect:
    """A form before its columns are known.

    Attributes:
        parts: a word for each part, with ? behind one that may be missing: the column of its name; or as in
            `prompt=question`, where the names of columns follow, or one of `_NAMES`; the first that is there is taken.
    """

    reader: Callable[[RawRow], Row | None]
    parts: str
    kind: RowKind = "single"
    name: str = ""

    def found_in(self, columns: Sequence[str], known: Names = _ALL_FOUND) -> Form | None:
        """The form with the columns that are there, if every part that it needs is.

        Args:
            known: the columns of parts that are named otherwise.
        """
        by_name = {plain(column): column for column in reversed(columns)}
        words = [word.rstrip("?").partition("=") for word in self.parts.split()]
        wanted = {part: known.get(part) or _NAMES.get(names) or (names or part).split("|") for part, _, names in words}
        found: dict[str, str] = {}
        for part in sorted(wanted, key=lambda part: part not in known):  # no other part takes a column that is named
            free = (by_name[name] for name in wanted[part] if name in by_name and by_name[name] not in found.values())
            if (column := next(free, None)) is not None:
                found[part] = column
            elif part in self.needs:
                return None
        columns_of = {part: found[part] for part in wanted if part in found}
        name = self.name or " + ".join(column for part, column in columns_of.items() if part in self.needs)
        return Form(name, columns_of, self.reader, self.kind)

    @property
    def needs(self) -> set[str]:
        return {word.partition("=")[0] for word in self.parts.split() if not word.endswith("?")}


_CHAT: Final = "tools? system=system|system_prompt?"
_PARTS: Final = f"input? context? history? {_CHAT}"
_TWO: Final = f"chosen rejected margin? {_CHAT}"

#: All forms, of which the first is taken whose columns are there.
_DIALECTS: Final = (
    # First, because a tokenised data set often keeps the columns that it was made of.
    _Dialect(_read_tokens, "input_ids labels? attention_mask?", name="tokens"),
    _Dialect(_read_rated, f"prompt completion label=kto_tag|label {_CHAT}", "rated"),
    _Dialect(_read_rated, f"messages=MESSAGES label=kto_tag {_CHAT}", "rated"),
    _Dialect(_read_rated, f"prompt=PROMPTS answer=ANSWERS label=kto_tag {_PARTS}", "rated"),
    # Messages with a label are texts with a class, unless the objective says otherwise.
    _Dialect(_read_labelled, "text=text|sentence|messages label=label|labels tools?", "labelled"),
    _Dialect(_read_rated, f"messages=messages|conversations label {_CHAT}", "rated"),
    _Dialect(_read_preference, f"prompt=conversations {_TWO}", "pairs"),
    _Dialect(_read_messages, f"messages=messages|conversations {_CHAT}"),
    _Dialect(_read_completion, f"prompt completion {_CHAT}"),
    _Dialect(_read_pair, f"prompt=question answer context? history? {_CHAT}"),
    _Dialect(_read_pair, f"prompt=instruction answer=output input? history? {_CHAT}"),
    _Dialect(_read_squad, "context prompt=question answers", name="SQuAD"),
    _Dialect(_read_text, "text"),
    _Dialect(_read_preference, f"prompt {_TWO}", "pairs"),
    _Dialect(_read_preference, f"prompt=MESSAGES {_TWO}", "pairs"),
    _Dialect(_read_preference, f"prompt=PROMPTS {_TWO} input? context? history?", "pairs"),
    _Dialect(_read_preference, _TWO, "pairs"),
    _Dialect(_read_messages, f"messages=MESSAGES {_CHAT}"),
    _Dialect(_read_pair, f"prompt=instruction answer=ANSWERS input=input|context? history? {_CHAT}"),
    _Dialect(_read_pair, f"prompt=PROMPTS answer=ANSWERS {_PARTS}"),
    _Dialect(_read_text, "text=TEXTS"),
    _Dialect(_read_rated, f"messages=MESSAGES label {_CHAT}", "rated"),
)
#: Prompts, whatever stands beside them: the column prompt holds text or messages, and others what a user asks.
_PROMPTED: Final = (
    _Dialect(_read_prompted, f"text=prompt {_CHAT}", "prompts", name="prompt"),
    _Dialect(_read_prompted, f"messages=MESSAGES {_CHAT}", "prompts"),
    _Dialect(_read_prompted, f"prompt=PROMPTS {_PARTS}", "prompts"),
)
#: What the configuration names by text_column, or by prompt_column and answer_column, of which one may be found.
_NAMED_TEXT: Final = _Dialect(_read_text, "text")
_NAMED_PAIR: Final = _Dialect(_read_pair, f"prompt=PROMPTS answer=ANSWERS history? {_CHAT}")

#: How prompts are read, with or without their answers; a text goes on.
ASKED: Final = (
    _Dialect(_read_prompted, f"messages=MESSAGES {_CHAT}", "prompts"),
    _Dialect(_read_prompted, f"prompt=prompt|question|instruction {_PARTS}", "prompts"),
    _Dialect(_read_prompted, "text=TEXTS", "prompts"),
    _Dialect(_read_prompted, f"prompt=PROMPTS {_PARTS}", "prompts"),
)
#: How what is scored is read: a text or messages, or a prompt and its answer.
SCORED: Final = (
    _Dialect(_read_unlabelled, "text=text|sentence|messages tools?"),
    _Dialect(
        _read_pair, f"prompt=prompt|question|instruction answer=completion|answer|response|output|chosen {_PARTS}"
    ),
)

#: Of rows that are not answers to learn: what they are, the columns they have, and the keys that name others.
_JUDGED: Final[Mapping[RowKind, tuple[str, str, str]]] = {
    "pairs": (
        "preference pairs, and objective=dpo takes prompt, chosen and rejected",
        "prompt, chosen and rejected",
        "prompt_column= names another prompt",
    ),
    "rated": (
        "answers with a label each, right or wrong, which objective=kto takes",
        "prompt, completion and label",
        "prompt_column= and answer_column= name others",
    ),
    "labelled": (
        "texts with a class or a number, which objective=classification takes, or with a rating, for objective=kto",
        "text and label",
        "text_column= and answer_column= name others",
    ),
    "prompts": (
        "prompts, which agents answer themselves",
        "a column prompt, question or messages, and what rewards read",
        "prompt_column= names another one",
    ),
}
#: Columns, in lower case, of rows that no form reads in full: without the last of them, other things would be learned.
_HALF_READ: Final = (
    *((name, _JUDGED["pairs"][0]) for name in ("preferred_output", "rejected_response", "rejected_messages")),
    ("kto_tag", _JUDGED["rated"][0]),
    *((f"question {name}", "questions with choices") for name in ("choices", "options")),
    ("ctx endings", "beginnings with a choice of endings"),
    *((name, "pictures or sounds") for name in ("image", "images", "audio", "audios", "video", "videos")),
)
#: What the error lists when nothing fits.
_WANTED: Final = (
    "input_ids; messages; conversations; prompt, completion; question, answer; instruction, output; "
    "context, question, answers; text; prompt, chosen, rejected; prompt, completion, label; text, label"
)


def first_form(dialects: Sequence[_Dialect], columns: Sequence[str], known: Names = _ALL_FOUND) -> Form | None:
    """The first form whose columns are all there; see `_Dialect.found_in`."""
    return next(filter(None, (each.found_in(columns, known) for each in dialects)), None)


def find_form(columns: Sequence[str], wanted: RowKind | None = "single", known: Names = _ALL_FOUND) -> Form | None:
    """The first form whose columns are all there, in any case.

    Args:
        wanted: what the rows are; None: any kind.
        known: the columns of parts that are named otherwise.
    """
    dialects = _PROMPTED if wanted == "prompts" else _DIALECTS
    fitting = [each for each in dialects if wanted in (None, each.kind) and known.keys() <= each.needs]
    return first_form(fitting, columns, known)


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
    if "label" in named and wanted is None:
        wanted = "labelled"
    for part, name in named.items():
        if plain(name) not in map(plain, columns):
            what = f"The data set has no column {name!r}; it has: {shown(columns)}."
            raise DataError(what, where=f"{where}, {_key(part)}: {name}", hint=f"set {_key(part)} to one of them")
    # Columns that are named in their own case come first: of `Text` and `text` the named one is meant.
    preferred = sorted(columns, key=lambda column: column not in named.values())
    known = {part: (plain(name),) for part, name in named.items()}
    if wanted == "prompts":  # answers are read by rewards alone
        known = {part: names for part, names in known.items() if part != "answer"}
    if wanted is not None and wanted in _JUDGED:
        form = _judged_form(preferred, known, where, wanted)
    elif given := {part: names for part, names in known.items() if part != "label"}:
        form = _named_form(preferred, given, where)
    else:
        form = _found_form(columns, where, wanted)
    if named or form.reader is _read_tokens:
        return form
    read = {*form.columns.values()} - ({form.columns.get("prompt")} if form.kind == "pairs" else set())
    return replace(form, beside=tuple(name for name in columns if plain(name) in _OF_PROMPTS and name not in read))


def _key(part: str) -> str:
    """The key of the configuration that names the column of a part."""
    return "answer_column" if part == "label" else f"{part}_column"


def _judged_form(columns: Sequence[str], known: Names, where: str, wanted: RowKind) -> Form:
    """The form of pairs, rated or labelled rows, whose prompt, text or label may be named."""
    form = find_form(columns, wanted, known)
    _, wants, way = _JUDGED[wanted]
    has_pictures = any(plain(name) in ("image", "images") for name in columns)
    if form is None and find_form(columns, wanted) is not None:
        named = " and ".join(map(_key, known))
        what = f"The objective takes {wants}, which the data set has, and {named} would name other columns."
        raise DataError(what, where=where, hint=f"leave {named} out")
    if form is None or has_pictures:
        raise DataError(
            f"The objective takes {wants}, and the data set has: {shown(columns)}.",
            where=where,
            hint=f"{way}; or rename the columns, or take objective=auto, which goes by them"
            f"{'; pictures are not learned here' * has_pictures}",
        )
    return form


def _named_form(columns: Sequence[str], known: Names, where: str) -> Form:
    names = [names[0] for names in known.values()]
    if len({*names}) < len(names):
        raise DataError(
            f"prompt_column and answer_column are the same column, {names[0]!r}.",
            where=where,
            hint=f"name two columns, or text_column={names[0]} to learn all of its text",
        )
    form = (_NAMED_TEXT if "text" in known else _NAMED_PAIR).found_in(columns, known)
    if form is None:
        missing = "answer" if "prompt" in known else "prompt"
        what = f"No column goes with {', '.join(names)}; the data set has: {shown(columns)}."
        raise DataError(what, where=where, hint=f"name it by {missing}_column=")
    return form


def _found_form(columns: Sequence[str], where: str, wanted: RowKind | None) -> Form:
    """The form of columns of which none is named."""
    form = find_form(columns, None)
    by_name = {plain(column): column for column in columns}
    if form is not None and form.kind != "single":
        if wanted is None:
            return form
        raise _half_read(_JUDGED[form.kind][0], form.columns.get("label") or form.columns["rejected"], where)
    for names, what in _HALF_READ:
        if {*names.split()} <= by_name.keys() and "input_ids" not in by_name:
            raise _half_read(what, by_name[names.split()[-1]], where)
    if form is None:
        what = f"The data set has no columns that can be used; it has: {shown(columns)}."
        raise DataError(what, where=where, hint=_advice(columns, where))
    return form


def _half_read(what: str, unread: str, where: str) -> DataError:
    return DataError(
        f"The data set looks like {what}, and {unread} would not be read.",
        where=where,
        hint=f"name the columns to train without {unread}: prompt_column= and answer_column=, or text_column=",
    )


def _advice(columns: Sequence[str], where: str) -> str:
    """The hint for columns of which no form is made."""
    of_splits = ".json" in where and not {"data", "train"}.isdisjoint(columns)
    first = "remove the other keys of a JSON object of splits: each must hold a list of rows; else " * of_splits
    names = columns if len(columns) == 2 and not of_splits else ("", "")
    named = zip(("prompt_column", "answer_column"), names, strict=True)
    typed = " and ".join(quote(f"{key}={name}") for key, name in named)
    more = "; the first line of a CSV file holds the names of its columns" if ".csv" in where else ""
    others = "or text_column=, with answer_column= for classes or numbers"
    return f"{first}say {typed}, {others}, or have one of: {_WANTED}{more}"


def shown(columns: Sequence[str]) -> str:
    """The names of columns; of an object whose keys are rows, the first ones."""
    more = f", ... ({len(columns)} in all)" if len(columns) > 20 else ""
    return (", ".join(columns[:20]) or "none") + more
