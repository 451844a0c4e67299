"""Documents in text and JSON files, and named corpora."""

import gzip
import json
import sys
import types
import zlib

import pytest

from iobs import data
from iobs.data import text
from iobs.errors import DataError


def test_read_documents_splits_text_at_separators(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("one\nmore\n<|endoftext|>\n\n<|endoftext|>\ntwo\n", encoding="utf8")
    assert [*data.read_documents(file)] == ["one\nmore", "two\n"]
    with gzip.open(tmp_path / "a.txt.gz", "wt", encoding="utf8") as compressed:
        compressed.write(file.read_text())
    assert [*data.read_documents(tmp_path / "a.txt.gz")] == ["one\nmore", "two\n"]


def test_read_documents_equals_a_plain_split(shared_data):
    file = shared_data / "tinystories" / "validation.txt"
    assert [*data.read_documents(file)] == file.read_text(encoding="utf8").split("\n<|endoftext|>\n")


def test_read_documents_yields_a_long_document_in_pieces(tmp_path):
    file = tmp_path / "a.txt"
    text = "".join(f"line {i}\n" for i in range(1000)) + "x" * 500
    file.write_text(text)
    pieces = [*data.read_documents(file, piece=100)]
    assert "".join(pieces) == text
    assert max(map(len, pieces)) < 200


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.jsonl.gz", "A.JSONL", "a.ndjson", "a.json", "c4-train.00000-of-01024.json.gz", "A.JSON.GZ"]
)
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_read_documents_reads_json_lines(tmp_path, name, mark):
    file = tmp_path / name
    content = '{"text": "one"}\n\n{"text": "two", "other": 1}\n{"text": " "}\n'
    content = mark + content
    file.write_bytes(gzip.compress(content.encode()) if name.lower().endswith("gz") else content.encode())
    assert [*data.read_documents(file)] == ["one", "two"]


@pytest.mark.parametrize("line", ["not json", '{"body": "x"}', '{"text": 3}', "[1]"])
def test_read_documents_names_a_bad_json_line(tmp_path, line):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "one"}\n' + line + "\n")
    with pytest.raises(DataError, match="line 2"):
        [*data.read_documents(file)]


@pytest.mark.parametrize("content", ['[{"text": "one"}]', '[\n {"text": "one"}\n]', '{\n "text": "one"\n}'])
def test_read_documents_explains_how_to_get_json_lines(tmp_path, content):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError, match=r"line 1: not a JSON object .* becomes that by"):
        [*data.read_documents(tmp_path / "a.json")]


def test_read_documents_drops_a_byte_order_mark(tmp_path):
    (tmp_path / "a.txt").write_text("\ufeffone", encoding="utf8")
    assert [*data.read_documents(tmp_path / "a.txt")] == ["one"]


def test_read_documents_names_a_damaged_gzip_file(tmp_path):
    content = bytearray(gzip.compress("".join(f'{{"text": "{i * i}"}}\n' for i in range(5000)).encode()))
    content[2000:2050] = bytes(byte ^ 0xFF for byte in content[2000:2050])
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(content)
    with pytest.raises(zlib.error), gzip.open(file) as opened:
        opened.read()
    with pytest.raises(DataError, match=r"a\.jsonl\.gz cannot be read"):
        [*data.read_documents(file)]
    with pytest.raises(DataError, match=r"a\.jsonl\.gz holds no questions"):
        data.read_questions(file)


@pytest.mark.parametrize("changed", [{"question": 5}, {"subject": None}, {"choices": "abcd"}, {"answer": 4}])
def test_questions_of_another_form_are_refused_when_they_are_read(tmp_path, changed):
    entry = {"split": "test", "subject": "s", "question": "q", "choices": ["a", "b", "c", "d"], "answer": 0, **changed}
    (tmp_path / "a.jsonl").write_text(json.dumps(entry))
    with pytest.raises(DataError, match="line 1"):
        data.read_questions(tmp_path / "a.jsonl")


def test_read_documents_names_unreadable_files(tmp_path, embedded):
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=r"not UTF-8 text \(invalid start byte\)"):
        [*data.read_documents(tmp_path / "a.txt")]
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"text" * 1000)[:20])
    with pytest.raises(DataError, match="cannot be read"):
        [*data.read_documents(tmp_path / "b.txt.gz")]
    with pytest.raises(DataError, match="is not a file"):
        data.open_source([str(tmp_path / "none.txt")], "calibration", embedded)


def test_corpora_errors_name_an_alternative(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install .*c4.txt"):
        next(text.corpus_documents("c4", "calibration"))

    def offline(*arguments, **options):
        raise ConnectionError("no route")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=offline))
    for name in data.CORPORA:
        with pytest.raises(DataError, match=f"{name} is neither cached nor within reach"):
            next(text.corpus_documents(name, "evaluation"))


def test_corpora_follow_their_conventions(monkeypatch):
    asked = []

    def load(*arguments, **options):
        asked.append((arguments, options))
        return ({"text": f"line {i}"} for i in range(3000))

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load))
    (whole,) = text.corpus_documents("wikitext2", "evaluation")
    assert whole.startswith("line 0\n\nline 1\n\n")
    assert asked[-1] == (("Salesforce/wikitext", "wikitext-2-raw-v1"), {"split": "test", "streaming": False})
    assert len([*text.corpus_documents("c4", "evaluation")]) == 1100
    assert len([*text.corpus_documents("c4", "calibration")]) == 3000


def test_read_documents_reads_the_c4_sample(shared_data):
    texts = [*data.read_documents(shared_data / "c4" / "c4_sample.jsonl.gz")]
    assert len(texts) == 1480
    with gzip.open(shared_data / "c4" / "c4_sample.jsonl.gz", "rt", encoding="utf8") as lines:
        assert texts[0] == json.loads(next(lines))["text"]
