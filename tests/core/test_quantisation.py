from types import SimpleNamespace

import pytest
from transformers import BitsAndBytesConfig

from steerlab.core._quantisation import quantisation


@pytest.mark.parametrize(
    ("stated", "method", "expected"),
    [
        (None, None, "none"),
        ({}, None, "none"),
        ({"quant_method": "compressed-tensors", "format": "int-quantized"}, None, "compressed-tensors int-quantized"),
        ({"quant_method": "awq", "bits": 4}, "awq_marlin", "awq_marlin 4-bit"),
        ({"quant_method": "gptq", "bits": 8}, None, "gptq 8-bit"),
        (BitsAndBytesConfig(load_in_8bit=True), None, "bitsandbytes int8"),
        (BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"), None, "bitsandbytes nf4"),
        ({"bits": 4}, None, "quantised 4-bit"),
        (None, "fp8", "fp8"),
    ],
)
def test_method_and_layout(stated, method, expected):
    assert quantisation(SimpleNamespace(quantization_config=stated), method) == expected
