"""The effects that are shipped, as plain functions: `app.shipped` declares them for users.

    guard          where a request may go: names, ports, addresses
    connection     a connection to an address that the guard has seen, and a body with a bound
    http           any request, guarded
    llm            chat with any OpenAI-compatible endpoint
    email          a mail: its headers and text, checked
    header_fields  header fields of a mail: encoded words, folding, comparison
    smtp           the conversation with a mail server
    tmux           panes: found, read, typed into
    agent          a text into a pane, once, submitted and confirmed
    dispatching    the same, with its record in the dispatch log

Extras are imported inside functions: a missing one is `NotInstalled`, which says what to install.
"""
