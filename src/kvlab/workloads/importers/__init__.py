"""Traffic of others as kvlab's traces: one file per format, which is recognised by how a file begins."""

from kvlab.registry import Registry
from kvlab.workloads.importers.base import Importer

IMPORTERS: Registry[type[Importer]] = Registry("format", __name__)
