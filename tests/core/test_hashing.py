from steerlab.core._hashing import HASH_LENGTH, bytes_hash, content_hash


def test_key_order_does_not_matter_and_content_does():
    assert content_hash({"a": 1, "b": [2]}) == content_hash({"b": [2], "a": 1})
    assert content_hash([1, 2]) != content_hash([2, 1])
    assert content_hash("ü") != content_hash("u")


def test_known_values():
    assert bytes_hash(b"") == "e3b0c44298fc1c14"
    assert content_hash([]) == bytes_hash(b"[]")
    assert len(content_hash(None)) == HASH_LENGTH
