"""The configuration of a run: one flat YAML file and the command line, read strictly, and without loading torch."""

from ci_llm.config.config import Change as Change
from ci_llm.config.config import Config as Config
from ci_llm.config.config import describe_keys as describe_keys
from ci_llm.config.config import groups as groups
from ci_llm.config.load import Reading as Reading
from ci_llm.config.load import arguments_without as arguments_without
from ci_llm.config.load import as_typed as as_typed
from ci_llm.config.load import default_file as default_file
from ci_llm.config.load import load_config as load_config
from ci_llm.config.load import parse_config as parse_config
from ci_llm.config.load import read_call as read_call
from ci_llm.config.load import read_config as read_config
