import pytest

from configs.rollout import ServedConfig


def test_a_server_needs_the_name_of_its_model():
    with pytest.raises(ValueError, match="model"):
        ServedConfig(type="ollama")


def test_servers_are_on_this_machine_by_default():
    assert ServedConfig(type="ollama", model="m").base_url == "http://127.0.0.1:11434"
    assert ServedConfig(type="openai", model="m").base_url == "http://127.0.0.1:8000/v1"


def test_a_key_never_leaves_the_machine_in_clear_text():
    with pytest.raises(ValueError, match="base_url"):
        ServedConfig(type="openai", model="m", base_url="http://far.example/v1", api_key_env="KEY")
    ServedConfig(type="openai", model="m", base_url="https://far.example/v1", api_key_env="KEY")
    ServedConfig(type="openai", model="m", base_url="http://127.0.0.1:1/v1", api_key_env="KEY")


@pytest.mark.parametrize("url", ["http://u:p@host/v1", "http://host/v1?key=1", "ftp://host"])
def test_an_address_has_no_user_and_no_query(url):
    with pytest.raises(ValueError, match=r"base_url"):
        ServedConfig(type="openai", model="m", base_url=url)
