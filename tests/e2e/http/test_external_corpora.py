"""SGLang's routes for texts to draft from, over an engine that drafts and one that does not."""

import pytest
from support.http_serve import make_text_model, served

pytestmark = pytest.mark.slow  # its engines take seconds to start


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_text_model(tmp_path_factory.mktemp("models") / "text")


def test_documents_are_added_listed_and_removed(model):
    with served("--model", str(model), "--speculation", "suffix") as engine:
        added = engine.ok("/add_external_corpus", {"corpus_id": "a", "documents": ["Hello, hello", "you"]})
        count = sum(
            engine.ok("/tokenize", {"prompt": ["Hello, hello", "you"], "add_special_tokens": False})["count"]
        )
        assert added == {"success": True, "corpus_id": "a", "message": "", "loaded_token_count": count}
        named = engine.ok("/add_external_corpus", {"token_ids": [[1, 2, 3]]})["corpus_id"]
        listed = engine.get("/list_external_corpora").json()
        assert listed == {"success": True, "corpus_token_counts": {"a": count, named: 3}, "message": ""}
        for path, body, said in (
            ("add", {"corpus_id": "a", "documents": ["x"]}, "remove it first"),
            ("add", {"corpus_id": "b"}, "either documents or token_ids"),
            ("add", {"file_path": "/etc/passwd"}, "send the documents"),
            ("remove", {"corpus_id": "b"}, "there is no corpus 'b'"),
        ):
            refused = engine.post(f"/{path}_external_corpus", body)
            assert (refused.status_code, refused.json()["success"]) == (400, False)
            assert said in refused.json()["message"]
        assert engine.ok("/remove_external_corpus", {"corpus_id": "a"})["success"]
        assert engine.get("/list_external_corpora").json()["corpus_token_counts"] == {named: 3}


def test_two_replicas_have_the_same_corpora(model):
    with served("--model", str(model), "--speculation", "suffix", "--replicas", "2") as engine:
        body = {"corpus_id": "a", "token_ids": [[1, 2, 3]]}
        assert engine.ok("/add_external_corpus", body)["loaded_token_count"] == 3
        assert "remove it first" in engine.post("/add_external_corpus", body).json()["message"]
        assert engine.ok("/remove_external_corpus", {"corpus_id": "a"})["num_tokens"] == 3
        assert engine.get("/list_external_corpora").json()["corpus_token_counts"] == {}
