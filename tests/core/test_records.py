import json

import numpy as np
import pandas as pd
import pytest

from steerlab.core import _files as files
from steerlab.core._records import field, frame_rows, placed_records, read_csv, read_jsonl
from steerlab.core.errors import DataError


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


# --- lines and encodings ------------------------------------------------------------------------------------------

OTHER_BREAKS = ["\r", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029"]


@pytest.mark.parametrize("sign", OTHER_BREAKS)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_only_line_feeds_end_a_row_of_csv(tmp_path, sign, end):
    path = write(tmp_path, end.join(["a,b", f"one{sign}two,x", f'"three{sign}four",y', ""]))
    assert list(read_csv(path)) == [
        (f"{path}:2", {"a": f"one{sign}two", "b": "x"}),
        (f"{path}:3", {"a": f"three{sign}four", "b": "y"}),
    ]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_a_file_is_read_in_the_encoding_it_begins_with(tmp_path, encoding):
    assert next(read_jsonl(write(tmp_path, '{"a": "東🙂"}\n'.encode(encoding))))[1] == {"a": "東🙂"}
    assert next(read_csv(write(tmp_path, "a\n東🙂\n".encode(encoding))))[1] == {"a": "東🙂"}


@pytest.mark.parametrize("read", [read_jsonl, read_csv, files.read_text, files.read_chunks])
def test_what_is_no_text_is_named_by_file_and_line(tmp_path, read):
    with pytest.raises(DataError, match=r"rows\.jsonl: line 2 is not UTF-8 text, the byte 0xe9"):
        list(read(write(tmp_path, b"1,2\ncaf\xe9,3\n")))
    with pytest.raises(DataError, match=r"rows\.jsonl: line 2 is not UTF-16"):
        list(read(write(tmp_path, "1\n2".encode("utf-16") + b"\x00")))


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 1 << 18])
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_a_file_in_chunks_is_the_file_with_line_feeds_alone(tmp_path, monkeypatch, chunk, encoding):
    text = "".join(f"one{sign}" for sign in OTHER_BREAKS) + "é\r\n\r\n東\r\r\n🙂\r"
    path = write(tmp_path, text.encode(encoding))
    assert files.read_text(path) == text
    if chunk >= 4:  # a mark is read whole
        monkeypatch.setattr(files, "_CHUNK", chunk)
        assert "".join(files.read_chunks(path)) == text.replace("\r\n", "\n")


def test_a_cell_may_be_huge(tmp_path):
    cell = "x" * 300_000
    assert [row for _, row in read_csv(write(tmp_path, f"a\n{cell}\n"))] == [{"a": cell}]


def test_a_number_of_thousands_of_digits_is_named_by_its_line(tmp_path):
    with pytest.raises(DataError, match=r"rows\.jsonl:2 is not a row"):
        list(read_jsonl(write(tmp_path, '{"a": 1}\n{"a": ' + "1" * 5000 + "}\n")))


# --- one JSON array -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("indent", [None, 2])
def test_the_rows_of_one_array(tmp_path, indent):
    rows = [{"a": "x\ny"}, {"a": [1, 2]}, {}]
    path = write(tmp_path, "\n " + json.dumps(rows, indent=indent) + "\n")
    lines = [2, 2, 2] if indent is None else [3, 6, 12]
    assert list(read_jsonl(path)) == [(f"{path}:{line}", row) for line, row in zip(lines, rows, strict=True)]
    assert list(read_jsonl(write(tmp_path, "[]"))) == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('[\n{"a": 1},\n{"a" 2}\n]', r":3 is not valid JSON.* at column 6"),
        ('[\n{"a": 1}\n{"a": 2}]', r":3 is not valid JSON: a comma or the array's end is missing"),
        ('[\n{"a": 1},\n3]', r":3 must be a JSON object, got int"),
        ('[{"a": 1}', r":1 is not valid JSON"),
        ('[{"a": 1},\n', r":2 is not valid JSON"),
        ('[{"a": 1}]\n{"a": 2}', r":2 stands after the end of the file's JSON array"),
        ('[\n{"a": "cut \\ud83d"}]', r":2 holds half a character"),
        ("[\n" + "[" * 100_000, r":2 is not a row: its JSON is nested too deeply"),
    ],
)
def test_a_bad_element_is_named_by_its_line(tmp_path, text, reason):
    with pytest.raises(DataError, match=r"rows\.jsonl" + reason):
        list(read_jsonl(write(tmp_path, text)))


# --- half characters ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [{"a": "cut \ud83d"}, {"a": ["b", {"c": "\ude00"}]}, {"\ud83d": 1}])
def test_half_a_character_is_named_by_its_place(tmp_path, row):
    path = write(tmp_path, '{"a": "\\ud83d\\ude00"}\n' + json.dumps(row))
    with pytest.raises(DataError, match=r"rows\.jsonl:2 holds half a character"):
        list(read_jsonl(path))
    with pytest.raises(DataError, match=r"record 1 holds half a character"):
        list(placed_records([{"a": "🙂"}, row]))
    with pytest.raises(DataError, match=r"row 0 holds half a character"):
        list(frame_rows(pd.DataFrame({"a": [["cut \ud83d"]]})))
