import socket

import pytest

from configs.errors import UserError
from envs.serving import listen


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_reply_in_two_parts_does_not_wait_for_the_first_to_be_acknowledged(host):
    with listen(host, 0) as listening, socket.create_connection(listening.getsockname()[:2]):
        connection, _ = listening.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_port_that_is_taken_or_none_is_refused_in_one_line():
    with listen("127.0.0.1", 0) as listening, pytest.raises(UserError, match=r"in use.*; choose another --port"):
        listen("127.0.0.1", listening.getsockname()[1])
    with pytest.raises(UserError, match=r"cannot listen on .* port 70000: "):
        listen("127.0.0.1", 70000)
