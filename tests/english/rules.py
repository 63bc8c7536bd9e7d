# SPDX-License-Identifier: Apache-2.0
"""Patterns of unclear English, as data: each has a name, a severity, a better wording, and regular expressions."""

from __future__ import annotations

import re
from typing import NamedTuple


class Rule(NamedTuple):
    """One pattern, which is searched in sentences without code.

    Attributes:
        name: Name in reports.
        is_error: Whether a file without a separate limit fails because of it. Otherwise it is a warning.
        advice: Wording to use instead.
        pattern: Regular expression.
    """

    name: str
    is_error: bool
    advice: str
    pattern: re.Pattern[str]


def _error(name: str, advice: str, *alternatives: str) -> Rule:
    return Rule(name, True, advice, re.compile("|".join(alternatives), re.IGNORECASE))


def _warning(name: str, advice: str, *alternatives: str) -> Rule:
    return Rule(name, False, advice, re.compile("|".join(alternatives), re.IGNORECASE))


RULES = (
    # A relative clause or a person instead of a noun.
    _error(
        "what-noun",
        "name the thing: result, payload, download, file, value",
        r"\b(?:what|whatever) (?:is|was|were|are|came|comes|goes|has|had|arrives|arrived|it (?:is|was|"
        r"has|took|takes|did|does)|they (?:have|had|sent|send)|a \w+ (?:has|sends|says|makes)|"
        r"the \w+ (?:has|had|says|makes|does))\b",
        r"\bof what (?!kind|type)\w+",
        r"\b(?:with|from|for|by|in|on|at|than|and) what (?:is|was|it|they|the|a|an|comes|came|goes)\b",
    ),
    _error(
        "who-noun",
        "name the actor: the client, contributors with …, the caller",
        r"(?:(?<=[.:;,] )|(?<=^)|\b(?:for|to|of|by|from|and|say|says|said|shows|tells|see|look for|name|"
        r"names) )who (?:is|was|has|had|have|does|did|lacks|fails|sends|sent|differs|took|takes|calls|"
        r"owns|it|they|handles|decide|counts|can)\b",
        r"^Who (?!should|is this)\w+",
    ),
    _error(
        "whoever",
        "name the actor: the caller, the user, any process",
        r"\b(?:whoever|whomever|whosever)\b",
    ),
    _error(
        "nobody",
        "no client, another user, another thread, all clients, any process",
        r"\b(?:nobody|somebody|everybody|anybody)\b",
        r"\bsomeone\b",
    ),
    _error(
        "stranger",
        "untrusted input; malicious (Byzantine) client",
        r"\bstrangers?\b",
        r"\bliars?\b",
        r"\b(?:may|might|can|to|that|who|which) lie\b(?! (?:in|on|at|one|next|beside|outside|within))",
        r"\blies about\b",
    ),
    # Verbs of persons, and static verbs.
    _error(
        "stands",
        "is, appears, tolerates, sits between",
        r"\bstands? (?!for itself|alone\b)\w+",
        r"\bstood\b",
    ),
    _error(
        "lies",
        "is (stored) at, is located in",
        r"\b(?:lies|lay|lying|lie) (?:in|on|at|one|there|next|beside|outside|within|between|closest|half|"
        r"below|from|in the|contiguous)\b",
    ),
    _warning(
        "says",
        "reports, lists, shows, describes, states",
        r"\b(?:log|report|message|file|page|document|docs?|schema|metadata|header|index|record|manifest|"
        r"line|table|rule|recipe|config\w*|comment|it|which|that|README|this) says?\b",
        r"\bsays (?:so|what|which|how|who|why|whether|of|the rest)\b",
        r"\bsaid of\b",
        r"\btells? of\b",
    ),
    _warning(
        "wants",
        "needs, requires, is unaware of, detects, is requested",
        r"\b(?:wants(?! to)|likes|believes?|believed|knows? (?:nothing|of|about)|forgets?|finds? (?:back|"
        r"out)|is asked|are asked|unasked|without being asked)\b",
    ),
    _error(
        "goes-on",
        "continues, resumes (from), proceeds",
        r"\b(?:goes|go|going|went|gone) on\b(?! to the (?:disk|next))",
    ),
    _warning(
        "give-back",
        "releases, frees, returns, removes",
        r"\b(?:gives?|given|giving|gave) (?:\w+ )?back\b",
        r"\blet(?:s|ting)? go\b",
        r"\btak(?:e|es|ing|en) away\b",
    ),
    _error(
        "begin-anew",
        "starts from, starts over, initial",
        r"\b(?:begins?|beginning|began) (?:with|anew|again|as|like|from|at)\b",
        r"\bto begin with\b",
    ),
    # Word order and idioms of another language.
    _error(
        "is-no",
        "is not a …",
        r"\b(?:is|are|was|were|be) no (?!longer|more\b|such|way|need|limit|network|different|public|"
        r"effect|room|space|other|second|point|reason|guarantee|default|order|quota|GPU|reference|"
        r"index$)\w+",
    ),
    _error(
        "has-not",
        "does not have, lacks",
        r"\bha(?:s|ve) (?:not|none)\b(?! (?:been|yet|to|\w+ed|already|received|sent|had|changed|set))",
    ),
    _error(
        "place-of",
        "replaces, instead of",
        r"\bin (?:the|its|their) place(?:s)?(?: of)?\b",
        r"\btakes? (?:the|its|their|our) places?\b",
        r"\btook (?:the|its) place\b",
    ),
    _error(
        "of-ours",
        "our …, your own …, NVFlare's …, separate",
        r"\bof (?:ours|yours|one'?s own|theirs|NVFlare'?s|torch's|mine)\b",
        r"\bof its own\b",
        r"\bof your own\b",
        r"\bof this user's own\b",
        r"\bof their own\b",
    ),
    _warning(
        "beside",
        "alongside, next to, compared with; 'also' or 'in addition' for besides",
        r"\bbesides?\b",
    ),
    _error(
        "under-way",
        "in flight",
        r"\bunder way\b",
        r"\bon (?:its|their) way\b",
    ),
    _warning(
        "at-a-time",
        "during, at once, the same number of",
        r"\b(?:in one go|for the length of|at a time, in|so many|as many as|as much as)\b",
    ),
    _error(
        "from-on",
        "of 3 MiB or more; starting at offset",
        r"\bfrom (?:\d[\w. ]*|[`\w]+|the second level) on\b(?! (?:disk|the disk))",
    ),
    _error(
        "too-tail",
        "also (before the verb)",
        r", too\b(?=[.,;:)]|$)",
        r"\bas well\.",
    ),
    _warning(
        "also-front",
        "including, even",
        r"(?<=[,;] )also (?:one|in|for|what|where|as|of|to|those|outside|a)\b",
    ),
    _warning(
        "that-of",
        "repeat the noun",
        r"\b(?:is|are|as|than|to|of|with|and|in|from|by) (?:that|those|the one|the ones) of\b",
        r"\bthose that\b",
    ),
    _warning(
        "made-of",
        "generated; result; effect; is produced",
        r"\bmade up (?:here|by)\b",
        r"\bare made up\b",
        r"\bmakes? (?:of|from) it\b",
        r"\bbecomes? of\b",
        r"\bcomes? of it\b",
        r"\bcame of\b",
        r"\bcomes? out\b",
        r"\bcoming out\b",
    ),
    _warning(
        "room",
        "space, capacity",
        r"\b(?:no|has|have|had|is|of|more|make|enough|keep|out of|wants?|the) room\b",
    ),
    _warning(
        "is-to",
        "must, should, will",
        r"\b(?:is|are|was|were) to (?!the |disk|zero|one\b|be (?:exact|clear))[a-z]+\b",
    ),
    _error(
        "as-if-exists",
        "exists, is missing, is available",
        r"\b(?:that|which|what|who) (?:there )?(?:is|are) (?:already )?there\b",
        r"\bis (?:not )?there(?: (?:already|any more|yet))?(?=[.,;:)]|$)",
        r"\bare (?:not )?there(?=[.,;:)]|$)",
    ),
    _error(
        "due",
        "expected … got …",
        r"\b(?:was|were) due\b",
        r"\bought to\b",
    ),
    _warning(
        "any-more",
        "no longer; again; in advance; in total; automatically / alone",
        r"\b(?:any more|anew|meanwhile|beforehand|hitherto|thereby|whereof|therein|altogether|by itself|"
        r"by themselves)\b",
    ),
    _warning(
        "once-more",
        "again",
        r"\bonce more\b",
        r"\bonce and\b",
        r"\bmore often than\b",
    ),
    _warning(
        "mistake",
        "error, bug, invalid input",
        r"\bmistakes?\b",
    ),
    _warning(
        "whole",
        "all or nothing; complete; atomically",
        r"\b(?:left out|taken|refused|read|there|is|are) whole\b",
        r"\bas a whole\b",
        r"\bwhole or not at all\b",
        r"\bold or new, never half\b",
        r"\bnever half\b",
    ),
    _warning(
        "left-out",
        "skipped (contributions), excluded (tensors): one word each",
        r"\bleft out\b",
        r"\bleav(?:e|es|ing) out\b",
        r"\bleft_out\b",
    ),
    _error(
        "fits-to",
        "matches, does not match",
        r"\bfits? to\b",
        r"\bunfit\b",
        r"\bmisfit\b",
        r"\b(?:does|do) not fit\b(?! (?:in|into|within))",
    ),
    _warning(
        "recipe-word",
        "entry; 'recipe' is NVFlare's word",
        r"\brecipes? (?:of|for) (?:a|the|lazy|all|an?y?) (?:lazy )?(?:tensor|array|model's)",
        r"\bas recipes\b",
        r"\bfrom recipes\b",
        r"\bthe recipe of (?:a|one)\b",
        r"\bsame recipe\b",
    ),
    _warning(
        "named-after",
        "plain wording; no figures of speech",
        r"\b(?:is|are|be|was|were) called\b",
        r"\bby the name of\b",
        r"\bin (?:the |its )?clothes\b",
        r"\bmotor of\b",
        r"\bground floor\b",
        r"\blowest stone\b",
        r"\briddle\b",
        r"\bplays? tricks\b",
        r"\bdead ones?\b",
        r"\bthe dead\b",
    ),
    _warning(
        "it-all",
        "name the thing",
        r"\ball of (?:it|this|that)\b",
        r"\bnone of it\b",
        r"\bnothing of (?:it|that|a)\b",
        r"\bmuch of it\b",
    ),
    _warning(
        "semicolon-chain",
        "split: one idea per sentence",
        r"[^.;|]{30,};[^.;|]{20,};[^.;|]{10,}",
        r"(?:,[^,.;:|]{4,60}){5,}",
    ),
    _warning(
        "per-a",
        "per line, for each document",
        r"\bone (?:\w+ ){0,3}a (?:line|round|document|file|sentence|call|tensor|module|name)\b",
        r"\bnumbers? an element\b",
        r"\ba line each\b",
    ),
    _error(
        "by-tail",
        "set on_mismatch='skip'",
        r", by (?:CODE|on_\w+|unknown_model)\b",
    ),
    _warning(
        "in-outside-of",
        "inside, outside",
        r"\b(?:inside|outside) of\b",
    ),
    _error(
        "for-one",
        "for example",
        r", for one\b",
    ),
    _warning(
        "come-arrive",
        "arrive, be received, be sent",
        r"\b(?:tensors?|results?|items?|bytes|pieces?|answers?|repl(?:y|ies)|data|all|everything|nothing|"
        r"it|they|none|files?|one|that|which) (?:has |have |had |never |ever )?(?:came|come)\b",
    ),
    _error(
        "is-none",
        "is not a valid …",
        r"\b(?:is|are|which is|that is) none(?: of)?\b",
    ),
)
