"""Mutations of what starts quickly: the completions from the table of words, and the settings."""

from __future__ import annotations

from tests.faults.mutant import Edit, Mutation

_COMPLETING = "mtask/cli/words.py"
_SETTINGS = "mtask/settings.py"

_COMPLETING_TESTS = "tests/unit/cli/test_completing.py"
_SETTINGS_TESTS = "tests/unit/test_settings.py"

STARTING_MUTATIONS = (
    Mutation(
        "completes-a-given-flag-again",
        "A shell offers a flag that the line has already.",
        (Edit(_COMPLETING, "_flags", "is_repeatable or not given.intersection(flag.names)", "names"),),
        (f"{_COMPLETING_TESTS}::test_the_answer_of_the_table_is_that_of_typer",),
    ),
    Mutation(
        "completes-a-value-by-commands",
        "A shell offers commands where the value of a flag stands.",
        (Edit(_COMPLETING, "completions", "flag if flag.takes_value else", ""),),
        (f"{_COMPLETING_TESTS}::test_the_answer_of_the_table_is_that_of_typer",),
    ),
    Mutation(
        "env-file-before-environment",
        "A .env file in the working folder overrides the environment.",
        (Edit(_SETTINGS, "Settings.settings_customise_sources",
              "env_settings, _EnvFile(settings_cls, dotenv_settings)",
              "_EnvFile(settings_cls, dotenv_settings), env_settings"),),
        (f"{_SETTINGS_TESTS}::test_the_environment_goes_before_the_env_file",),
    ),
    Mutation(
        "env-file-names-a-program",
        "Whoever can write a .env file chooses the program that mtask runs.",
        (Edit(_SETTINGS, "_EnvFile.__call__", "if name not in _NOT_FROM_FILE", ""),),
        (f"{_SETTINGS_TESTS}::test_env_file_in_the_working_folder_does_not_name_a_binary_that_is_run",),
    ),
)  # fmt: skip
