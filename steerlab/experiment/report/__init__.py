"""Reports: one self-contained HTML page, or Markdown with its pictures beside it, of everything an experiment found."""

from steerlab.experiment.report.document import document
from steerlab.experiment.report.material import Finding, Material
from steerlab.experiment.report.write import material_of, write_material, write_report

__all__ = ["Finding", "Material", "document", "material_of", "write_material", "write_report"]
