"""OpenIE: entities and (subject, predicate, object) triples of a passage."""
