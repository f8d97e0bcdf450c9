"""Microsoft Azure's traces of LLM inference."""

from kvlab.workloads.importers import IMPORTERS
from kvlab.workloads.importers.base import RowImporter
from kvlab.workloads.sources.azure import azure_rows


@IMPORTERS.register("azure")
class AzureImporter(RowImporter):
    """See `kvlab.workloads.sources.azure`."""

    what, source, unknown = "Azure's trace of LLM inference", "azure", ("prefixes",)
    marks = ("ContextTokens",)
    rows = staticmethod(azure_rows)
