//! Delivers by HTTP POST.
