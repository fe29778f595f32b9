"""Uploads an exported folder to the Hugging Face Hub."""

from pathlib import Path

from lit_het.console import message
from lit_het.data_pipelines.shards import stores
from lit_het.errors import UserError


def push(folder: Path, repository: str, remains: str = "") -> None:
    """Creates a model repository if it does not exist, and uploads all files of a folder in one commit.

    Args:
        folder: an export with a model card.
        repository: ``owner/name``.
        remains: what an error says of the folder.
    """
    from huggingface_hub import HfApi, get_token

    if get_token() is None:
        raise UserError(f"no token of the Hugging Face Hub: run 'hf auth login' or set HF_TOKEN{remains}")
    try:
        api = HfApi()
        api.create_repo(repository, exist_ok=True)
        found = api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Upload a model of lit-het")
    except Exception as error:  # the client's errors are those of its transport, which differs between versions
        raise UserError(f"{repository} was not uploaded ({stores.reason(error)}){remains}") from error
    message(f"{repository} is at {found.commit_url}")
