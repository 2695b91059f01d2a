"""Ranks, a network and servers of a membership as a model: every message may be the last one that a server sends."""

from __future__ import annotations

import random
from collections import deque

from composer3d.replicas import NOTHING, Membership, Place, ReplicaPolicy
from composer3d.replicas.rank_requests import RankRequests
from composer3d.replicas.resumption import Standing, settle

STEPS = 3


class Rank:
    """A rank's loop, as `ReplicaSteps` has it: it asks, receives the state or computes, votes, and asks again."""

    def __init__(self, place, attempt):
        self.place, self.attempt = place, attempt
        self.requests = RankRequests(place.group)
        self.inbox, self.outbox = deque(), deque()
        self.server = None  # number of the server that it is connected to
        self.step = NOTHING  # of its state
        self.quorum = None
        self.is_let_in = self.is_broken = self.is_done = self.has_left = False
        self.say({"do": "hello"})

    def say(self, message):
        answer = self.requests.make(message)
        if answer is not None:
            self.take(answer)
        elif self.is_let_in:
            self.outbox.append(message)

    def ask(self):
        if self.step == STEPS + 1:
            self.is_done = True
            return self.say({"do": "leave"})
        self.say({"do": "ask", "step": self.step})

    def take(self, answer):
        """Go on after the answer to a request."""
        if "has_begun" in answer:
            self.step = NOTHING if answer["has_begun"] else 0
            self.ask()
        elif "spare" in answer:
            self.step = NOTHING
            self.ask()
        elif "members" in answer:
            self.quorum, self.is_broken = answer, False
            assert self.place.group in answer["members"]
            assert (self.place.group in answer["behind"]) or self.step == answer["step"], "nobody is a step ahead"
        elif "commit" in answer:
            quorum, self.quorum = self.quorum, None
            if answer["commit"]:
                assert self.voted, "a step counts where all have all of it"
                self.step = quorum["step"] + 1
            self.ask()
        elif "left" in answer:
            self.has_left = True

    def vote(self, *, ok):
        self.voted = ok
        if ok:
            self.step = self.quorum["step"]  # it has received the state, if it had none
        self.say({"do": "vote", "ok": ok})


class Model:
    """A run of groups, of which some are lost, and so are servers.

    Args:
        seed: Of all that is random.
        groups: Number of groups.
        ranks: Ranks per group.
        crashes: How often a server is lost, and the group of its machine with it or not.
        losses: How often a group is lost.
        spares: See `ReplicaPolicy`.
    """

    def __init__(self, seed, *, groups=3, ranks=2, crashes=2, losses=1, spares=0):
        self.random = random.Random(seed)
        self.policy = ReplicaPolicy(spares=spares, join_s=0)
        self.groups, self.num_ranks = groups, ranks
        self.crashes, self.losses, self.is_calm = crashes, losses, not losses
        self.attempts = dict.fromkeys(range(groups), 0)
        self.ranks = {}
        self.places = {}  # of the server: ranks that it knows
        self.term, self.stated, self.tension = 0, None, 0
        self.membership = Membership(self.policy, num_groups=groups, num_ranks=ranks)
        self.committed = 0  # steps that some rank was told
        self.lost_state = False
        for group in range(groups):
            self.start(group)

    def start(self, group):
        for rank in range(self.num_ranks):
            place = Place(group, rank)
            self.ranks[place] = Rank(place, self.attempts[group])

    # ---- events ------------------------------------------------------------------------------------------------------

    def events(self):
        found = []
        for place, rank in self.ranks.items():
            if rank.server is None:
                found.append((self.come, place))
            else:
                found += [(self.receive, place)] * bool(rank.outbox) + [(self.deliver, place)] * bool(rank.inbox)
            if rank.quorum is not None and rank.requests.pending is None:
                found += [(self.exchange, place)]
        is_whole = all(each.server == self.term for each in self.ranks.values())
        # Or the time is over, and those that have not come are given up.
        if self.stated is not None and (is_whole or (not self.is_calm and self.random.random() < 0.01)):
            found.append((self.resume, None))
        return found

    def disturbances(self):
        found = [(self.crash, None)] if self.crashes else []
        return found + ([(self.lose, self.random.randrange(self.groups))] if self.losses else [])

    def come(self, place):
        """Connect a rank to the server that serves now."""
        rank = self.ranks[place]
        rank.server, rank.outbox, rank.inbox = self.term, deque(), deque()
        has_greeted = rank.requests.has_greeted
        if self.stated is not None:
            self.places[place] = rank
            standing = rank.requests.standing
            # As JSON, as it is sent.
            self.stated[place] = Standing.from_json(standing.to_json()) if has_greeted else None
        elif has_greeted and not (rank.requests.standing.is_new and self.membership.resolution is not None):
            assert not self.is_calm, "groups that live are not started again"
            self.end(place.group)
        elif has_greeted:
            self.greet(rank, {"resumed": self.membership.resolution.to_json()})
        else:
            self.greet(rank, self.greeting())

    def greeting(self):
        resolution = self.membership.resolution
        known = {} if resolution is None else {"resolution": resolution.to_json()}
        return {"has_begun": self.membership.has_begun, **known}

    def greet(self, rank, message):
        assert self.membership.come(rank.place, attempt=rank.attempt, setup="") is None
        self.places[rank.place] = rank
        rank.inbox.append(("first", message))

    def receive(self, place):
        """Let the server take a message."""
        rank, message = self.ranks[place], self.ranks[place].outbox.popleft()
        if place not in self.places:  # the server has ended the connection
            return
        if message["do"] == "ask":
            told = self.membership.ask(place, step=message["step"], stop=False)
        elif message["do"] == "vote":
            told = self.membership.vote(place, ok=message["ok"])
        else:
            told = self.membership.leave(place)
            rank.inbox.append(("", {"left": True}))
        self.send(told)

    def send(self, messages):
        for place, message in messages:
            if place in self.places:
                self.places[place].inbox.append(("", message))
            if "out" in message:
                self.places.pop(place, None)

    def deliver(self, place):
        """Let a rank take a message."""
        rank = self.ranks[place]
        kind, message = rank.inbox.popleft()
        if "broken" in message:
            rank.is_broken = True
        elif kind == "first":
            rank.is_let_in, epoch_is_over = True, rank.quorum is not None
            answer = rank.requests.resume(message)
            rank.is_broken |= epoch_is_over
            if answer is None and rank.requests.pending is not None:
                rank.outbox.append(rank.requests.pending)
            if answer is not None:
                self.taken(rank, answer)
        else:
            rank.requests.take(message)
            self.taken(rank, message)

    def taken(self, rank, answer):
        if "out" in answer:
            assert not self.is_calm or "no group is left" in answer["out"], "groups that live are not started again"
            self.end(rank.place.group)
        else:
            rank.take(answer)
            self.committed = max(self.committed, rank.step)

    def exchange(self, place):
        """End a rank's exchange: well, if all of its members are there, or not, if one of them is gone."""
        rank = self.ranks[place]
        quorum = rank.quorum
        twins = [self.ranks.get(Place(group, place.rank)) for group in quorum["members"]]
        source = self.ranks.get(Place(quorum["source"], place.rank))
        there = [
            each is not None and each.quorum is not None and each.quorum["round"] == quorum["round"] for each in twins
        ]
        whole = all(there) and all(each.attempt == self.attempts[each.place.group] for each in twins)
        given = source is not None and source.step == quorum["step"]
        if whole and given and (not rank.is_broken or self.random.random() < 0.5):
            rank.vote(ok=True)
        elif rank.is_broken:
            rank.vote(ok=False)

    def end(self, group):
        """End a group's ranks; the server notices, and the group is started again."""
        for rank in range(self.num_ranks):
            self.ranks.pop(Place(group, rank), None)
            self.places.pop(Place(group, rank), None)
            if self.stated is not None:
                self.stated.pop(Place(group, rank), None)
        if self.stated is None:
            self.send(self.membership.lose(group, "killed"))
            self.attempts[group] += 1
            self.send(self.membership.expect(group, self.attempts[group]))
        else:
            self.attempts[group] += 1
        self.start(group)

    def lose(self, group):
        """Kill a group, or have the server give up one that lives."""
        self.losses -= 1
        if self.stated is not None or self.random.random() < 0.5:
            return self.end(group)
        self.send(self.membership.lose(group, "silent"))
        self.places = {place: rank for place, rank in self.places.items() if place.group != group}

    def crash(self, _):
        """Lose the server: messages on their way to it, and some of those that it has sent last."""
        self.crashes -= 1
        for rank in self.ranks.values():
            arrived = self.random.randrange(len(rank.inbox) + 1)
            while len(rank.inbox) > arrived:
                rank.inbox.pop()
        while any(rank.server == self.term and rank.inbox for rank in self.ranks.values()):
            place = self.random.choice([place for place, rank in self.ranks.items() if rank.inbox])
            if self.ranks[place].inbox[0][1].get("out"):
                self.ranks[place].inbox.clear()
                continue
            self.deliver(place)
        for rank in self.ranks.values():
            rank.server, rank.is_let_in = None, False
            rank.outbox.clear()
        had_begun = self.membership.has_begun
        self.term += 1
        self.places, self.stated = {}, {}
        self.membership = Membership(self.policy, num_groups=self.groups, num_ranks=self.num_ranks)
        self.had_begun = had_begun and self.random.random() < 0.5
        if self.random.random() < 0.7:  # that of its machine
            group = self.random.randrange(self.groups)
            if not any(rank.is_done for rank in self.ranks.values()):
                self.end(group)

    def resume(self, _):
        """Let the new server decide."""
        stated, self.stated = self.stated, None
        for group, attempt in self.attempts.items():
            self.membership.expect(group, attempt)
        groups = {}
        for place, standing in stated.items():
            groups.setdefault(place.group, {})[place.rank] = standing or Standing(has_state=False)
        settled = settle(groups, term=self.term, num_ranks=self.num_ranks, has_begun=self.had_begun)
        ranks = {place: self.attempts[place.group] for place in stated}
        messages = self.membership.resume(settled, ranks, setup="")
        for place, message in messages:
            fresh = stated[place] is None and "resumed" in message
            self.ranks[place].inbox.append(("first", self.greeting() if fresh else message))
        for group, reason in settled.out.items():
            for rank in range(self.num_ranks):
                if Place(group, rank) in self.places:
                    self.ranks[Place(group, rank)].inbox.append(("first", {"out": reason}))
            self.places = {place: rank for place, rank in self.places.items() if place.group != group}

    # ---- the run -----------------------------------------------------------------------------------------------------

    def run(self):
        """Run to the end, or until nobody has the state; return how far it came."""
        for _ in range(20_000):
            if self.ranks and all(rank.has_left or not self.is_needed(rank) for rank in self.ranks.values()):
                return "finished"
            if self.stated is None and self.membership.is_lost:
                kept = [rank for place, rank in self.ranks.items() if place in self.places]
                holders = [rank.place.group for rank in kept if rank.step >= self.committed > 0]
                assert all(holders.count(group) < self.num_ranks for group in holders), "a group has the state"
                return "lost"
            events = self.events()
            # More often while a server takes over, and just after.
            self.tension = 20 if self.stated is not None else max(0, self.tension - 1)
            if self.random.random() < (0.2 if self.tension else 0.05):
                events = self.disturbances() or events
            if not events:
                if self.membership.is_short():
                    self.send(self.membership.form())
                    continue
                raise AssertionError(f"nothing happens any more: {self.describe()}")
            event, place = self.random.choice(events)
            event(place)
        raise AssertionError(f"no end: {self.describe()}")

    def is_needed(self, rank):
        """Return whether the run waits for a rank: not for groups that came when others had finished."""
        return not (any(each.has_left for each in self.ranks.values()) and rank.step == NOTHING)

    def describe(self):
        shown = {
            tuple(place): (rank.step, rank.requests.standing, rank.requests.pending, rank.is_broken)
            for place, rank in self.ranks.items()
        }
        return f"{shown}, left {self.membership.left}, round {self.membership.round}"
