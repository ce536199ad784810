import pytest

from steerlab.core.errors import DataError
from steerlab.core.records import field, read_jsonl


def write(tmp_path, text):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_reads_rows_with_their_line_numbers(tmp_path):
    path = write(tmp_path, '{"a": 1}\n\n  \n{"a": 2}\r\n')
    assert list(read_jsonl(path)) == [(f"{path}:1", {"a": 1}), (f"{path}:4", {"a": 2})]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"])
def test_unicode_line_separators_inside_a_string_do_not_split_the_row(tmp_path, separator):
    path = write(tmp_path, f'{{"a": "one{separator}two"}}\n{{"a": "three"}}\n')
    assert [(place.rsplit(":", 1)[1], row["a"]) for place, row in read_jsonl(path)] == [
        ("1", f"one{separator}two"),
        ("2", "three"),
    ]


def test_a_byte_order_mark_is_no_content(tmp_path):
    assert [row for _, row in read_jsonl(write(tmp_path, b'\xef\xbb\xbf{"a": 1}'))] == [{"a": 1}]


@pytest.mark.parametrize(
    ("bad", "reason"), [("{", "not valid JSON"), ("[1]", "JSON object, got list"), ('"a"', "JSON object, got str")]
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, bad, reason):
    path = write(tmp_path, f'{{"a": 1}}\n{bad}\n')
    with pytest.raises(DataError, match=rf"rows\.jsonl:2.*{reason}"):
        list(read_jsonl(path))


def test_unreadable_files_are_data_errors(tmp_path):
    with pytest.raises(DataError, match="Cannot read"):
        list(read_jsonl(tmp_path / "missing.jsonl"))
    with pytest.raises(DataError, match="Cannot read"):
        list(read_jsonl(write(tmp_path, b"\xff\xfe\x00")))


@pytest.mark.parametrize("value", [None, "", []])
def test_a_missing_field_names_the_keys_there_are(value):
    with pytest.raises(DataError, match=r"f:3 has no 'b'; its keys are a, b"):
        field({"a": 1, "b": value}, "b", "f:3")


def test_zero_and_false_are_values():
    assert field({"a": 0}, "a", "f:1") == 0
    assert field({"a": False}, "a", "f:1") is False
