"""The error tree.

TxExportError          anything that is refused or fails; exit code 1 unless said
├── PluginError        no such model, pass or provider, or no such option; exit code 2
├── LoadError          a source, checkpoint, tokenizer or text that can't be read
├── ExportError        a module that the exporter can't take
├── PassError          a pass that can't be applied, or changed nothing
├── BudgetError        outside the error budget; exit code 3
├── ArtifactError      an artifact that is missing, damaged or not ours
└── ProviderError      an execution provider that isn't there, or fails
"""

from tx_export.runtime import ArtifactError, ProviderError, TxExportError

__all__ = [
    "ArtifactError",
    "BudgetError",
    "ExportError",
    "LoadError",
    "PassError",
    "PluginError",
    "ProviderError",
    "TxExportError",
]


class PluginError(TxExportError):
    """No such model, pass or provider, or no such option of it."""

    exit_code = 2


class LoadError(TxExportError):
    """A source, checkpoint, tokenizer or text that can't be read."""


class ExportError(TxExportError):
    """A module that the exporter can't take."""


class PassError(TxExportError):
    """A pass that can't be applied, or changed nothing."""


class BudgetError(TxExportError):
    """Outside the error budget."""

    exit_code = 3
