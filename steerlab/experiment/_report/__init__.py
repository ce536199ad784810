"""Reports: one self-contained HTML page, or Markdown with its pictures beside it, of everything an experiment found."""

from steerlab.experiment._blocks.findings import Finding
from steerlab.experiment._blocks.material import Material
from steerlab.experiment._report.document import document
from steerlab.experiment._report.write import material_of, write_material

__all__ = ["Finding", "Material", "document", "material_of", "write_material"]
