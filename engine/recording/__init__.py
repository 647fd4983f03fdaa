"""What an engine did, kept in bounded memory or in a file: any moment of it can be rebuilt exactly.

    engine thread    Tape.mark()      before every step, and before it sleeps: what has changed since the last mark
                        │
                     Delta            the changed rows of one moment                        (delta.py, watch.py)
                        │  every 64
                     Span             their columns, one under the other                    (span.py, columns.py)
                        │
    any thread       Recording        base + spans, never changed                           (recording.py)
                        │  state_at(step), at(step), save(path)
                     State            a moment, rolled forward from the nearest one known   (state.py)

A *moment* is the state at the end of step s: the last one before step s + 1 begins. What users told the engine between two
steps belongs to the moment before. What requests have written is kept beside it (texts.py). The engine's thread never
copies the whole pool: it notes the blocks that changed. Needs numpy only: a recording replays where torch is not installed.
"""
