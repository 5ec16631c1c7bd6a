"""The configuration of a run: one flat YAML file and the command line, read strictly; loads neither torch nor more."""

from ci_llm.config.load import Change as Change
from ci_llm.config.load import Config as Config
from ci_llm.config.load import describe_keys as describe_keys
from ci_llm.config.load import groups as groups
from ci_llm.config.load import keys_as_markdown as keys_as_markdown
from ci_llm.config.load import load_config as load_config
from ci_llm.config.load import parse_config as parse_config
