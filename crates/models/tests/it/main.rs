//! Every model holds in all its states, reaches what it should, and breaks when a rule is left out.

mod models;
