"""What an engine's thread posts gets to the event loop, all of it, in order, and not for ever."""

from __future__ import annotations

import select
import threading

import pytest

from dflash_trio.engine.loop_mailbox import LoopMailbox, MailboxClosed


def is_readable(mailbox: LoopMailbox[int]) -> bool:
    return bool(select.select([mailbox], [], [], 0)[0])


def test_a_message_makes_the_mailbox_readable_until_it_is_taken() -> None:
    mailbox = LoopMailbox[int]()
    assert not is_readable(mailbox)
    mailbox.post(1)
    mailbox.post(2)
    assert is_readable(mailbox)
    assert list(mailbox.take()) == [1, 2]
    assert not is_readable(mailbox)
    mailbox.post(3)
    assert is_readable(mailbox)
    mailbox.close()


def test_a_message_that_comes_while_others_are_taken_wakes_again() -> None:
    mailbox = LoopMailbox[int]()
    mailbox.post(1)
    for message in mailbox.take():
        assert message == 1
        mailbox.post(2)
    assert is_readable(mailbox)
    assert list(mailbox.take()) == [2]
    mailbox.close()


def test_a_closed_mailbox_takes_nothing_and_gives_what_it_had() -> None:
    mailbox = LoopMailbox[int]()
    mailbox.post(1)
    mailbox.close()
    with pytest.raises(MailboxClosed):
        mailbox.post(2)
    assert list(mailbox.take()) == [1]


def test_nothing_is_lost_between_two_threads() -> None:
    mailbox, total = LoopMailbox[int](), 20_000

    def write() -> None:
        for number in range(total):
            mailbox.post(number)

    thread = threading.Thread(target=write)
    thread.start()
    taken: list[int] = []
    while len(taken) < total:
        assert select.select([mailbox], [], [], 10)[0], "a wake-up was lost"
        taken += mailbox.take()
    thread.join()
    mailbox.close()
    assert taken == list(range(total))
