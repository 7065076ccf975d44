"""SGLang's routes for the texts of its n-gram speculation: this engine drafts from them, too."""

from typing import Annotated, Any, ClassVar

import msgspec
from litestar import HttpMethod

from ....io_struct.base import MAX_ID_LENGTH, new_id
from ....io_struct.generate import MAX_SEQUENCES, TokenId
from ...exceptions import InvalidRequest, Unsupported
from ..bodies import VISIBLE, NothingBody, Strict
from ..commands import Form, command, failure, success
from ..context import FrontEnd

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ID_LENGTH, pattern=VISIBLE)]


class AddCorpusBody(Strict, kw_only=True):
    corpus_id: Name | None = None
    documents: Annotated[list[str], msgspec.Meta(max_length=MAX_SEQUENCES)] | None = None
    token_ids: list[list[TokenId]] | None = None
    """Caesura's own: documents as ids."""
    # refused unless empty
    file_path: Any = None

    REFUSED: ClassVar = ("file_path",)


@command("/add_external_corpus", Form(lambda _, found: found, failure), size="prompts")
async def add_external_corpus(front: FrontEnd, body: AddCorpusBody) -> dict[str, Any]:
    """Keep texts to draft from, for every prompt; without a name they get a random one."""
    if body.file_path:
        raise Unsupported("file_path is not supported: send the documents", field="file_path")
    if (body.documents is None) == (body.token_ids is None):
        raise InvalidRequest("give either documents or token_ids", field="documents")
    texts, name = body.token_ids, body.corpus_id or new_id()
    if texts is None:
        encode, documents = front.manager.need_tokenizer("documents").encode, body.documents or []
        texts = await front.workers.run(
            lambda: [encode(each, add_special_tokens=False) for each in documents]
        )
    count = (await front.client.add_corpus(name, texts)).num_tokens
    return {"success": True, "corpus_id": name, "message": "", "loaded_token_count": count}


class RemoveCorpusBody(Strict, kw_only=True):
    corpus_id: Name


@command("/remove_external_corpus", success(""))
async def remove_external_corpus(front: FrontEnd, body: RemoveCorpusBody) -> object:
    return await front.client.remove_corpus(body.corpus_id)


def _listed(_: object, corpora: dict[str, int]) -> dict[str, Any]:
    return {"success": True, "corpus_token_counts": corpora, "message": ""}


@command("/list_external_corpora", Form(_listed, failure), HttpMethod.GET)
async def list_external_corpora(front: FrontEnd, body: NothingBody) -> object:
    return await front.client.list_corpora()
