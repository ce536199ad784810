import numpy as np
import pandas as pd
import pytest

from steerlab.core.errors import DataError
from steerlab.core.records import field, frame_rows, placed_records, read_csv, read_jsonl


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


def test_a_missing_field_names_the_keys_there_are():
    with pytest.raises(DataError, match=r"f:3 has no 'b'; its keys are a, c"):
        field({"a": 1, "c": 2}, "b", "f:3")


@pytest.mark.parametrize("value", [None, "", []])
def test_a_field_that_is_there_and_empty_is_called_empty(value):
    with pytest.raises(DataError, match=r"f:3: 'b' is empty"):
        field({"a": 1, "b": value}, "b", "f:3")


def test_zero_and_false_are_values():
    assert field({"a": 0}, "a", "f:1") == 0
    assert field({"a": False}, "a", "f:1") is False


# --- CSV ----------------------------------------------------------------------------------------------------------


def test_csv_rows_come_with_the_line_they_start_on(tmp_path):
    path = write(tmp_path, 'a,b\n1,"two\nlines, ""quoted"""\n\n ,x\r\n')
    assert list(read_csv(path)) == [
        (f"{path}:2", {"a": "1", "b": 'two\nlines, "quoted"'}),
        (f"{path}:5", {"a": " ", "b": "x"}),
    ]


def test_csv_cells_keep_their_newlines(tmp_path):
    assert [row for _, row in read_csv(write(tmp_path, b'\xef\xbb\xbfa\r\n"x\r\ny"\r\n'))] == [{"a": "x\r\ny"}]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no header"),
        ("a,a\n1,2\n", "rows.jsonl:1 names a column twice"),
        ("a,b\n1,2\n3\n", "rows.jsonl:3 has 1 cells, the header has 2"),
        ("a,b\n1,2,3\n", "rows.jsonl:2 has 3 cells"),
        ('a,b\n1,2\n3,"4', "rows.jsonl:3 is not valid CSV"),
        ('a,b\n1,"2"x\n', "rows.jsonl:2 is not valid CSV"),
        ("a,b\n1," + "x" * 200_000, "rows.jsonl:2 is not valid CSV"),
        (b"a\n\xff\n", "Cannot read"),
    ],
)
def test_bad_csv_is_named_by_file_and_line(tmp_path, text, reason):
    with pytest.raises(DataError, match=reason):
        list(read_csv(write(tmp_path, text)))


# --- frames and records -------------------------------------------------------------------------------------------


class Polars:
    """As much of a polars frame as is used."""

    columns = ["a", "b"]

    def to_dicts(self):
        return [{"a": "x", "b": None}, {"a": "y", "b": 2}]


def test_frames_of_both_kinds():
    assert list(frame_rows(Polars())) == [("row 0", {"a": "x", "b": None}), ("row 1", {"a": "y", "b": 2})]
    frame = pd.DataFrame({"a": ["x", None], "b": [1, np.nan], 3: [[1, 2], np.array([3])]}, index=[7, 9])
    assert list(frame_rows(frame)) == [
        ("row 0", {"a": "x", "b": 1.0, "3": [1, 2]}),
        ("row 1", {"a": None, "b": None, "3": [3]}),
    ]


def test_missing_values_and_numpy_values_become_plain():
    frame = pd.DataFrame({"n": pd.array([1, pd.NA], dtype="Int64"), "t": [pd.NaT, pd.NaT], "i": np.array([1, 2])})
    rows = [row for _, row in frame_rows(frame)]
    assert rows == [{"n": 1, "t": None, "i": 1}, {"n": None, "t": None, "i": 2}]
    assert all(type(row["i"]) is int for row in rows)


@pytest.mark.parametrize("frame", [3, None, "x", [{"a": 1}], {"a": [1]}, pd.DataFrame([[1, 2]], columns=["a", "a"])])
def test_what_is_no_frame_is_refused(frame):
    with pytest.raises(DataError, match="frame"):
        list(frame_rows(frame))


@pytest.mark.parametrize("records", [3, None, "x", b"x", {"prompt": "p"}, [3], ["x"], [None]])
def test_what_is_no_list_of_records_is_refused(records):
    with pytest.raises(DataError, match="dictionar"):
        list(placed_records(records))


@pytest.mark.parametrize("path", [3, None, ["a"], "a\0b"])
@pytest.mark.parametrize("read", [read_jsonl, read_csv])
def test_what_is_no_path_is_refused(path, read):
    with pytest.raises(DataError):
        list(read(path))


def test_json_nested_too_deeply_is_named_by_its_line(tmp_path):
    with pytest.raises(DataError, match=r"rows\.jsonl:1"):
        list(read_jsonl(write(tmp_path, "[" * 100_000)))
