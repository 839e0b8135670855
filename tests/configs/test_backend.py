import pytest

from configs.rollout import ServedConfig


def test_servers_are_on_this_machine_by_default_and_need_the_name_of_a_model():
    assert ServedConfig(type="ollama", model="m").base_url == "http://127.0.0.1:11434"
    assert ServedConfig(type="openai", model="m").base_url == "http://127.0.0.1:8000/v1"
    with pytest.raises(ValueError, match="model"):
        ServedConfig(type="ollama")


@pytest.mark.parametrize("url", ["http://u:p@h/v1", "http://h/v1?key=1", "ftp://h", "http://far.example/v1"])
def test_an_address_has_no_user_and_no_query_and_gets_no_key_in_clear_text(url):
    with pytest.raises(ValueError, match="base_url"):
        ServedConfig(type="openai", model="m", base_url=url, api_key_env="KEY")
    for safe in ("https://far.example/v1", "http://127.0.0.1:1/v1"):
        ServedConfig(type="openai", model="m", base_url=safe, api_key_env="KEY")
