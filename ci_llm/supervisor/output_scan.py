"""The evidence in an attempt's output: non-finite losses, lack of memory, kills, learning rates, W&B runs, by line.

Only whole tokens match: "nano", "finance loss" and "nancy" never do. Nor does a sentence about what would happen
("stops if loss is NaN", "stop on NaN loss", "to avoid NaN loss"), what did not happen ("0 nan losses found") or what
was best so far ("best_val_loss=inf").

Every pattern looks at a bounded piece of the line, so that the time per line is bounded too. Messages without a value
are data, in output_scan.yaml beside this file.
"""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Final
from urllib.parse import unquote

_ANSI: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
#: A line without one of these words can match no pattern below. This cheap test is the last one for most lines.
_MAY_MATCH: Final = re.compile(
    r"nan|\binf|finite|invalid loss|loss scale|memory|alloc|exhausted|oom|kill|exitcode|wandb|degenerate|resource"
    r"|not initialized",
    re.IGNORECASE,
)
#: How many characters before a match are read as its sentence.
_CONTEXT: Final = 160
#: How many non-finite values of one line are examined.
_MAX_VALUES: Final = 32
_HYPOTHETICAL: Final = re.compile(
    r"(?i)\b(?:if|when|whenever|whether|unless|until|in case|(?:may|might|could|can|would|should)(?! not\b)"
    # The future is no event, but for that of one which has a cause: "will stop, as the loss is nan".
    r"|(?:will|shall)(?! not\b)(?![^.:;!?]*\b(?:because|since|as|due to|owing to)\b)"
    # A purpose: an infinitive of what is done about a failure.
    r"|to (?:stop|abort|end|halt|terminate|quit|exit|prune|pause|do|continue|resume|find|debug|detect|trace|fix|solve"
    r"|cure|get rid|cause|lower|reduce|decrease|limit|minimi[sz]e|mitigate|survive|reject|report|raise|warn)"
    r"|(?:avoid|prevent|catch|handl|check|watch|guard|look|assert|retry|recover|ignor|skip|mask|filter|drop|replac)(?:e|s|es|p?ing)?)"
    r"\b(?:[^.:;!?]|\.(?=\w|$))*$"
)
#: A failure as a condition ("stop on", "retries after"), or as something possible ("the risk of").
_CONDITION: Final = re.compile(
    r"(?i)\b(?:on|upon|after|against|detects|detection of|(?:risk|chance|danger|cause|number)s? of)\s+"
    r"(?:(?:an?|the|any|each|every|\d{1,9})\s+)*$"
)
#: A verb by which such a clause tells of an event all the same: "stopped on", "giving up after"; not "is restarted on".
_EVENT: Final = re.compile(
    r"(?i)\b(?<!\bis )(?<!\bare )(?:(?:stopp|abort|terminat|halt|exit|quitt|end|crash|fail|kill|rais|giv|bail|break"
    r"|restart|relaunch|retry)(?:ed|ing)|retried|died|gave|broke|threw)\b[^.:;!?]*$"
)
_DENIED: Final = re.compile(
    r"(?:\b(?:no|not|never|without|zero|any)|(?<!epoch)(?<!step)(?<!rank)[ :]0|^0)\s+$", re.IGNORECASE
)
#: The script says in the same line that it continues without what failed.
_HANDLED: Final = re.compile(
    r"(?i)\b(?:(?:skipp|ignor|retry|recover|discard|dropp|mask|replac)ing|falling back|instead|handled|caught"
    r"|(?:is|are|was|were) (?:skipped|ignored|retried|discarded|dropped|masked|replaced)"
    r"|setting [\w ]{1,30} to (?:0|zero))\b"
)
#: What follows a message where it is a question, the name of a feature, or of a count that is 0.
_TALK: Final = re.compile(
    r"(?i)\s*\?|\s+(?:(?:errors?|exceptions?)\s+(?:are|can|will|may)\b|(?:handl|recover|protect|check|guard|retr)\w*)"
    r"|(?:\s+\w{1,20}){0,2}\s*[:=|]\s*(?:0|no|none|false|off)\b"
)

#: A line of the script's source, as a traceback shows it, or of its help. It talks about a loss and reports none.
_SOURCE: Final = re.compile(
    r"│[\s❱]*\d+\s*│.*(?:[(=]|\b(?:raise|assert|return)\b)|\s*(?:(?:raise|except|assert|return|elif) [\w(]"
    r"|(?:print|logg\w{1,9}\.\w{1,9})\(|--?\w[\w-]{0,40}(?: \w{1,20})?\s{2})"
)

# A loss with a value. The value is found first, because it is rare; the text to its left then says what it belongs to.

_VALUE: Final = re.compile(
    r"(?<![\w.+-])[-+]?(?:(?P<nan>nan)|inf(?:inity)?)"
    r"(?:(?=Epoch \d|Batch \d)"  # the bar of Keras, cut short
    # Otherwise a whole token. Lightning pads numbers to a width with zeros: nan.0
    r"|(?:\.0*)?(?![\w-]|\.\w|/(?!inf|nan)[a-z]|\s*-+>|\s+(?:values?|checks?|counts?|handling|detection|filter|guard)\b))"
    r"(?!\s*[:=?]\s*(?:false|no|none|off|0)\b)",
    re.IGNORECASE,
)
_OF_WHAT: Final = (
    r"(?:train(?:ing)?|val(?:id(?:ation)?)?|eval(?:uation)?|test|dev|mean|avg|average|total|sum|value|now|gen|disc|[dg]"
    r"|(?:at |in |for |on |after )?(?:step|epoch|iter(?:ation)?|batch)|\d{1,9})"
)
#: Names of losses without that word. Their infinity has harmless reasons, as that of a perplexity: only NaN counts.
_OTHER: Final = (
    r"(?<![a-z])(?P<other>nll|elbo|\w{0,9}nloglik|xent\w{0,6}|cross[ _-]?entropy|b?ce|rmsle|r?mse|mae|cost|ppl"
    r"|perplexity|(?<=-)m?error|(?<='s )l[12])(?![a-z])"
)
_LOSS: Final = (
    r"(?:(?:(?<![a-z])|(?<=log)|(?<=train)|(?<=val)|(?<=valid)|(?<=test)|(?<=eval)|(?<=total)|(?-i:(?<=[a-zA-Z])(?=L)))"
    rf"loss(?:es)?|{_OTHER})"
    r"(?P<rest>(?:[_/.][\w/.]{0,60})?)"
    rf"(?:\s{{0,3}}[(\[]?{_OF_WHAT}[)\]]?){{0,3}}"
)
_WRAPPED: Final = r"(?:\w{1,20}(?:\.\w{1,20}){0,3}\()?"  # tensor(nan, np.float32(nan
_LIST: Final = r"\[\s{0,8}(?:[-+.\de]{1,20}[,\s]\s{0,3}){0,8}"  # [1.0, nan
_BECAME: Final = (
    r"(?:returned in \S{1,60}\s+)?(?:has\s+|have\s+)?"
    r"(?:is|was|are|were|becomes?|became|(?:turned|diverged|exploded)(?:\s+(?:to|into))?|went(?:\s+to)?|reached|got|hit|equals)"
    r"(?:\s+(?:now|either|an?|inf|infinite|infinity|nan|or))*\s+"
)
_NAMED: Final = re.compile(
    rf"{_LOSS}[\"'`\]]?(?:"
    rf"\s*\(?[:=：]\s*[\"'(]?{_WRAPPED}(?:{_LIST})?"  # loss: nan, 'loss': 'nan', losses: [1.0, nan
    r"|\s*[:=]?\s*[-+.\de]{0,20}\s*(?:->|=>|→)\s*|\s+[-–]\s+"  # loss: 0.3 -> nan, loss at epoch 3 - nan
    rf"|\s+(?P<became>{_BECAME})"  # the loss is now nan
    r"|\s*[|│┃║]\s*"  # a cell of a table
    r"|\s*[:=]?\s*[-+.\de]{1,20}\s*\((?:avg:?\s*)?(?P<mean>\s*)"  # Loss: 2.3 (nan): the mean so far
    rf"|(?P<bare>\s+){_WRAPPED}(?:{_LIST})?"  # loss nan, losses [1.0, nan
    r")\Z",
    re.IGNORECASE,
)
_AFTER_BARE: Final = re.compile(
    r"\s*(?:[,;:!|│┃)\]}/(]|$)|\t|\s{2}|\s+(?:encountered|detected|found|appeared|occurred)\b"
    r"|\s+(?:at|in|on|after|during)\s+(?:\w{1,20}\s+)?(?:step|epoch|iter|batch|update|rank)"
    r"|\s+(?:[\w/.%@-]{1,30}\s*[:=]?\s*[\[(]?[-+]?(?:\d|(?:nan|inf)\b)|[-+]?\d+\.\d)",  # the next column: lr 0.01
    re.IGNORECASE,
)
#: pandas writes NaN, and a row of a printed Series or table is a name, then values: it ends no training.
_ROW_OF_PANDAS: Final = re.compile(r"(?:\s+(?:[-+.\de]{1,25}|NaN|None))*\s*(?:dtype: \w+)?\s*")
#: Losses of another time (the best, the previous one), and quantities that merely have "loss" in their name.
_BEST: Final = re.compile(
    r"(?<![a-z])(?:(?:best|lowest|smallest|prev(?:ious)?)(?:[_/.-][a-z]{1,20}){0,3}"
    r"|min(?:imum)?|max(?:imum)?|old|target|delta|std)"
    r"(?:[_/. -]?(?:train|val|valid|validation|eval|test|dev|avg|mean|model|so far)){0,3}[_/. -]*\Z",
    re.IGNORECASE,
)
_NOT_A_LOSS: Final = re.compile(
    r"(?:^|[_/.])(?:scale|scaler|scaling|weights?|std|stddev|var|delta|diff|change|min|max|best|limit|threshold|clip|fn|mask)"
    r"(?:[_/.]|$)",
    re.IGNORECASE,
)

#: A learning rate with its value. A bound, a base or a peak of a schedule is another quantity.
_RATE: Final = re.compile(
    r"(?<![\w-])(?<!min )(?<!max )(?<!base )(?<!peak )(?<!initial )"
    r"(?:lr|learning[ _-]?rate)(?:[-/]\w+)?[\"']?\s*[=:|]?\s*[\[(\"']*(\d+(?:\.\d*)?(?:e[-+]?\d+)?)(?![\w%])",
    re.IGNORECASE,
)

_RUN_URL: Final = re.compile(r"https?://[^\s/]+/([^\s/]+)/([^\s/]+)/runs/([\w-]+)")
_RUN_FOLDER: Final = re.compile(r"\bsaved locally in \S*[\\/]run-\d{8}_\d{6}-([\w-]+)")
_RUN_ID: Final = re.compile(r"^WandB run ID: ([\w-]+)", re.IGNORECASE)
_RESUMED: Final = re.compile(r"\bwandb: Resuming run\b")


@dataclass(frozen=True)
class WandbRun:
    """A run of Weights & Biases as the output names it. Only a URL names its entity and project."""

    id: str
    entity: str | None = None
    project: str | None = None


@dataclass(frozen=True)
class UserPatterns:
    """Regular expressions that a user adds to those of this file, for messages of the user's own script."""

    nonfinite: tuple[re.Pattern[str], ...] = ()
    out_of_memory: tuple[re.Pattern[str], ...] = ()

    def nonfinite_in(self, line: str) -> bool:
        """Whether the line reports a loss that is not finite."""
        return any(pattern.search(line) for pattern in self.nonfinite)

    def out_of_memory_in(self, line: str) -> bool:
        """Whether the line reports that memory ran out."""
        return any(pattern.search(line) for pattern in self.out_of_memory)


def plain(line: str) -> str:
    """Return the line without colours and cursor movements."""
    return _ANSI.sub("", line)


def may_match(line: str) -> bool:
    """Whether any pattern of this file, but that of a learning rate, could match the line."""
    return _MAY_MATCH.search(line) is not None and not _SOURCE.match(line)


def says_nonfinite(line: str) -> bool:
    """Whether the line reports a loss that is NaN or infinite, or an end of the training because of one."""
    values = islice(_VALUE.finditer(line), _MAX_VALUES)
    return any(_is_present_loss(line, value) for value in values) or _any("nonfinite", line)


def says_out_of_memory(line: str) -> bool:
    """Whether the line reports that memory, of a device or of the host, ran out."""
    return _any("out_of_memory", line)


def says_killed(line: str) -> bool:
    """Whether the line reports that a process of the script died of SIGKILL."""
    return _any("killed", line)


def says_resumed(line: str) -> bool:
    """Whether the line reports that W&B resumes a run that existed before."""
    return _RESUMED.search(line) is not None


def printed_rate(line: str) -> str | None:
    """Return the learning rate that the line names, as written there: `lr: 1.00e-03`, `'learning_rate': 5e-05`."""
    lower = line.lower()
    found = _RATE.search(line) if "lr" in lower or "learning" in lower else None
    return found[1] if found else None


def wandb_run(line: str) -> WandbRun | None:
    """Return the W&B run that the line names, or None."""
    if "wandb" not in line.lower():
        return None
    if url := _RUN_URL.search(line):
        entity, project, run_id = map(unquote, url.groups())
        return WandbRun(run_id, entity, project)
    named = _RUN_FOLDER.search(line) or _RUN_ID.search(line)
    return WandbRun(named[1]) if named else None


def _is_present_loss(line: str, value: re.Match[str]) -> bool:
    """Whether a non-finite value belongs to a loss, and to the present one: the text before it is the name of one."""
    left = line[max(0, value.start() - _CONTEXT) : value.start()]
    named = _NAMED.search(left)
    if named is None:
        return False
    # A running mean may be infinite for a harmless reason (nothing counted yet); NaN has none.
    if (named["mean"] is not None or named["other"]) and value["nan"] is None:
        return False
    if named["mean"] is not None and not re.match(r"\s*\)", line[value.end() :]):
        return False
    before = left[: named.start()]
    if _BEST.search(before) or _NOT_A_LOSS.search(named["rest"]) or _HYPOTHETICAL.search(before):
        return False
    if named["became"]:
        untold = _is_supposed(before) or _DENIED.search(before)
        return not (untold or _HANDLED.search(before) or _HANDLED.search(line, value.end()))
    return named["bare"] is None or _ends_column(line, value, before, named["bare"])


def _ends_column(line: str, value: re.Match[str], before: str, gap: str) -> bool:
    """Whether "loss nan", which any sentence may hold, is a column of a log and not a row that pandas has printed."""
    if value[0] == "NaN" and (len(before.split()) < 2 or len(gap) > 1) and _ROW_OF_PANDAS.fullmatch(line, value.end()):
        return False
    return _AFTER_BARE.match(line, value.end()) is not None


def _any(kind: str, line: str) -> bool:
    matches = (pattern.search(line) for pattern in _patterns(kind))
    return any(match is not None and _happened(line, match) for match in matches)


@cache
def _patterns(kind: str) -> tuple[re.Pattern[str], ...]:
    """The patterns of a kind of messages, in which `<name>` stands for the part of that name."""
    from ci_llm.config.yaml_file import read_texts  # here, because the help of safe_train.py does without

    known = read_texts(Path(__file__).with_suffix(".yaml"))
    texts: list[str] = known[kind]
    for name, part in known["parts"].items():
        texts = [text.replace(f"<{name}>", part) for text in texts]
    return tuple(map(re.compile, texts))


def _is_supposed(before: str) -> bool:
    """Whether a clause that begins like this speaks of what would happen, and not of what has happened."""
    return bool(_HYPOTHETICAL.search(before) or (_CONDITION.search(before) and not _EVENT.search(before)))


def _happened(line: str, match: re.Match[str]) -> bool:
    """Whether the line around a match neither denies it, nor makes it a condition, nor says that it was handled."""
    before = line[max(0, match.start() - _CONTEXT) : match.start()]
    if _is_supposed(before) or _DENIED.search(before) or _HANDLED.search(before):
        return False
    return not (_TALK.match(line, match.end()) or _HANDLED.search(line, match.end(), match.end() + _CONTEXT))


#: A script that continues for so many lines after it ran out of memory has recovered from that.
RECENT_LINES: Final = 20
_MAX_LINE_LENGTH: Final = 4096
_LINE_END: Final = re.compile(r"[\r\n]+")

_MAX_TRACEBACK_LINE: Final = 500
#: An exception that lies this many lines back did not end the script.
_TRACEBACK_LINES: Final = 500
#: What may stand before a line: the rank (torchrun, srun -l, mpirun), or the margin of an exception group.
_MARGIN: Final = re.compile(r"^(?:\[[\w,]{1,20}\](?:<\w{1,8}>)?: ?|\d{1,5}: |\s*\| ?)")
_HEADER: Final = "Traceback (most recent call last)"
_LOG_LEVEL: Final = re.compile(r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\b")
#: The last line of a traceback: `ValueError: boom`, `pkg.errors.Boom: why`, `KeyboardInterrupt`.
_LAST_LINE: Final = re.compile(r"(?:(?:\w+\.)*[A-Z]\w*|(?:\w+\.)+\w+)(?::(?:\s.*)?)?$")
#: What is an exception outside of a traceback too, and the last message of programs that print no traceback.
_WITHOUT_TRACEBACK: Final = re.compile(
    r"\s*(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Expired|Failure)(?:\(\w+\))?: +\S"
    r"|Fatal Python error: |\S+: error: "  # argparse
    r"|Could not override |In '[^']{1,200}': Could not |(?:Cannot find p|P)rimary config "  # Hydra
)
#: Exceptions that a launcher or a peer raises because the script has died.
_CONSEQUENCE: Final = re.compile(
    r"\bChildFailedError\b|\breturned non-zero exit status\b|\bProcessExitedException\b|\bSignalException\b"
    r"|\bConnection (?:closed|reset) by peer\b|\bBroken pipe\b|\bDistBackendError\b|\bremote process exited\b"
    r"|(?:^|\.)(?:KeyboardInterrupt|SystemExit)\b|^(?:srun|slurmstepd): error: "
)
#: Introduces a traceback of an exception that Python has caught and that ends nothing.
_IGNORED: Final = re.compile(r"Exception ignored in|Error in atexit|--- Logging error ---")
#: Last lines that say nothing about what happened.
_EMPTY_WORDS: Final = re.compile(
    r"Set the environment variable HYDRA_FULL_ERROR=1|For simplicity, JAX has removed|wandb: |[\W_]*$"
)


class LineSplitter:
    """Cuts one stream of bytes into lines at \\r and \\n, in whatever pieces the bytes arrive.

    Args:
        take: called with every line.
    """

    def __init__(self, take: Callable[[str], None]) -> None:
        self._take = take
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._rest = ""

    def feed(self, data: bytes) -> None:
        """Hand over the lines that `data` completes; b"" is the end of all. A line that is too long comes in pieces."""
        *lines, self._rest = _LINE_END.split(self._rest + self._decode(data, not data))
        if not data or len(self._rest) > _MAX_LINE_LENGTH:
            lines.append(self._rest)
            self._rest = ""
        for line in lines:
            for start in range(0, len(line), _MAX_LINE_LENGTH):
                self._take(line[start : start + _MAX_LINE_LENGTH])


class Evidence:
    """What the output of one attempt said.

    Args:
        user_patterns: patterns of the user, beside the known ones.

    Attributes:
        nonfinite, killed: the first line that reported it; None if no line did.
        out_of_memory: the first line that reported the latest lack of memory; None if no line did.
        learning_rate: the last one that was printed, as written there.
        wandb_runs: the W&B runs that were named, by id.
        wandb_resumed: a W&B run existed before this attempt.
        last_lines: the end of the output, for people.
        num_lines: how many lines there were, each redrawing of a progress bar included.
    """

    def __init__(self, user_patterns: UserPatterns | None = None) -> None:
        self._user_patterns = user_patterns or UserPatterns()
        self._tracebacks = _Tracebacks()
        for kind in ("nonfinite", "out_of_memory", "killed"):
            _patterns(kind)  # read before an attempt runs, which may fill the disk
        self.nonfinite: str | None = None
        self.out_of_memory: str | None = None
        self.killed: str | None = None
        self.learning_rate: str | None = None
        self.wandb_runs: dict[str, WandbRun] = {}
        self.wandb_resumed = False
        self.last_lines: deque[str] = deque(maxlen=RECENT_LINES)
        self.num_lines = 0
        self._lines_since_memory = 0  # those of tracebacks apart

    def ended_out_of_memory(self, *, failed: bool) -> bool:
        """Whether the lack of memory ended the script: it told little after that.

        Args:
            failed: its exit code was not 0. Then it may have tidied up for long, unless another exception ended it.
        """
        limit = _TRACEBACK_LINES if failed and self.exception is None else RECENT_LINES
        return self.out_of_memory is not None and self._lines_since_memory < limit

    @property
    def exception(self) -> str | None:
        """The exception that ended the script, as far as the output shows it."""
        return self._tracebacks.exception

    @property
    def last_words(self) -> str:
        """The exception that ended the script, or else the last line that says something."""
        spoken = (line for line in reversed(self.last_lines) if not _EMPTY_WORDS.match(line))
        return self.exception or next(spoken, "it said nothing")

    def note(self, line: str) -> None:
        """Take one line of the output into account."""
        line = plain(line[:_MAX_LINE_LENGTH])
        self._tracebacks.note(line)  # with its indentation, which the rest does without
        line = line.strip()
        if not line:
            return
        self.num_lines += 1
        self._lines_since_memory += not self._tracebacks.is_open
        self.last_lines.append(line)
        self.learning_rate = printed_rate(line) or self.learning_rate
        may = may_match(line)
        if self._user_patterns.nonfinite_in(line) or (may and says_nonfinite(line)):
            self.nonfinite = self.nonfinite or line
        if self._user_patterns.out_of_memory_in(line) or (may and says_out_of_memory(line)):
            self._note_out_of_memory(line)
        if may and says_killed(line):
            self.killed = self.killed or line
        if may:
            self._note_wandb(line)

    def _note_wandb(self, line: str) -> None:
        self.wandb_resumed |= says_resumed(line)
        # A later line may name the same run without its project: the fuller one stays.
        run = wandb_run(line)
        if run is not None and (run.project or run.id not in self.wandb_runs):
            self.wandb_runs[run.id] = run

    def _note_out_of_memory(self, line: str) -> None:
        if self.out_of_memory is None or self._lines_since_memory >= RECENT_LINES:
            self.out_of_memory = line
        self._lines_since_memory = 0


class _Tracebacks:
    """Finds the exception that ended a script: the last one that is neither ignored nor a consequence of another.

    Of chained exceptions that is the last one, in the order in which Python prints them. An exception of a launcher or
    of a peer counts only where the script itself printed none.

    Attributes:
        is_open: the latest line belongs to a traceback, and is not its last one.
    """

    def __init__(self) -> None:
        self._cause: str | None = None
        self._consequence: str | None = None
        self._lines_since = 0
        self.is_open = self._is_ignored = self._continues = False

    @property
    def exception(self) -> str | None:
        """The exception with its message in one line; None without a recent one."""
        return (self._cause or self._consequence) if self._lines_since < _TRACEBACK_LINES else None

    def note(self, line: str) -> None:
        """Take a line into account, with its indentation: inside a traceback only its last line has none."""
        self._lines_since += 1
        # Cut, because some exceptions print a whole tensor.
        line = _MARGIN.sub("", line[:_MAX_TRACEBACK_LINE].rstrip())
        if self._continues and line:
            self._complete(line.strip())
        if _HEADER in line:
            self.is_open = True
        elif _IGNORED.match(line):
            self._is_ignored = True
        elif self._ends_traceback(line) or _WITHOUT_TRACEBACK.match(line):
            self._note_exception(line.strip())

    def _ends_traceback(self, line: str) -> bool:
        # Log lines of other processes mix with a traceback: "ERROR: ..." looks like an exception named ERROR.
        return self.is_open and _LAST_LINE.match(line) is not None and not _LOG_LEVEL.match(line)

    def _note_exception(self, exception: str) -> None:
        is_ignored = self._is_ignored and self.is_open
        self.is_open = self._is_ignored = False
        self._lines_since = 0
        if is_ignored:
            return
        if _CONSEQUENCE.search(exception):
            self._consequence = exception.rstrip(":")
        else:
            self._cause = exception
            self._continues = exception.endswith(":")

    def _complete(self, line: str) -> None:
        """A message that ends with a colon continues in the next line."""
        self._continues = False
        if not _EMPTY_WORDS.match(line):
            self._cause = f"{self._cause} {line}"
