"""Reports: one self-contained HTML page, or Markdown with its pictures beside it, of everything an experiment found."""

from steerlab.experiment.blocks.findings import Finding
from steerlab.experiment.blocks.material import Material
from steerlab.experiment.report.document import document
from steerlab.experiment.report.write import material_of, write_material

__all__ = ["Finding", "Material", "document", "material_of", "write_material"]
