//! Which spaces somebody may look into. A token names them: one (`team:payments`), all of a kind (`team:*`), or all but the
//! private ones (`*`). Whose memories are private is seen by whoever was given that space, or `private:*`, by name.

use postrider::tx::{Dialect, Value};

use crate::note::check_space;

const PRIVATE: &str = "private:";

/// All spaces, or those that are named.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Spaces(Option<Vec<String>>);

/// One name of a space, taken apart.
enum Named<'a> {
    AllButPrivate,
    /// All that begin so, like `team:`.
    Kind(&'a str),
    One(&'a str),
}

fn parse(name: &str) -> Named<'_> {
    match name.strip_suffix('*') {
        Some("") => Named::AllButPrivate,
        Some(kind) if kind.ends_with(':') => Named::Kind(kind),
        _ => Named::One(name),
    }
}

impl Spaces {
    pub fn all() -> Self {
        Spaces(None)
    }

    pub fn these(names: Vec<String>) -> Self {
        Spaces(Some(names))
    }

    /// What is wrong with a name, if anything.
    pub fn check(name: &str) -> Result<(), String> {
        match parse(name) {
            Named::AllButPrivate => Ok(()),
            Named::Kind(kind) => check_space(kind),
            Named::One(space) if space.contains('*') => {
                Err(format!("`{space}`: write a space (team:payments), all of a kind (team:*) or `*`"))
            }
            Named::One(space) => check_space(space),
        }
    }

    pub fn are_all(&self) -> bool {
        self.0.is_none()
    }

    /// As they were named; empty where all are meant.
    pub fn names(&self) -> Vec<String> {
        self.0.clone().unwrap_or_default()
    }

    /// Also of a kind as a whole (`team:*`): only what covers all of it does.
    pub fn cover(&self, space: &str) -> bool {
        let covers = |name: &String| match parse(name) {
            Named::AllButPrivate => !space.starts_with(PRIVATE),
            Named::Kind(kind) => space.starts_with(kind),
            Named::One(own) => own == space,
        };
        self.0.as_ref().is_none_or(|names| names.iter().any(covers))
    }

    /// The same as a condition on a column, which may also hold the empty text: what is in no space is everybody's.
    pub(crate) fn condition(&self, dialect: Dialect, column: &str, params: &mut Vec<Value>) -> Option<String> {
        let names = self.0.as_ref()?;
        // MySQL has spaces as bytes, so that their case is told apart.
        let length = |text: &str| if dialect == Dialect::Mysql { text.len() } else { text.chars().count() };
        let mut any = vec![format!("{column} = ''")];
        for name in names {
            any.push(match parse(name) {
                Named::AllButPrivate => {
                    params.push(PRIVATE.into());
                    format!("SUBSTR({column}, 1, {}) <> ?", length(PRIVATE))
                }
                Named::Kind(kind) => {
                    params.push(kind.into());
                    format!("SUBSTR({column}, 1, {}) = ?", length(kind))
                }
                Named::One(space) => {
                    params.push(space.into());
                    format!("{column} = ?")
                }
            });
        }
        Some(format!("({})", any.join(" OR ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(names: &[&str]) -> Spaces {
        match names {
            [] => Spaces::all(),
            names => Spaces::these(names.iter().map(|name| (*name).to_owned()).collect()),
        }
    }

    #[test]
    fn what_is_private_is_covered_only_by_its_name() {
        for (names, space, covered) in [
            (&[][..], "private:ann", true),
            (&["*"], "team:a", true),
            (&["*"], "private:ann", false),
            (&["*", "private:ann"], "private:ann", true),
            (&["*", "private:ann"], "private:anna", false),
            (&["private:*"], "private:ann", true),
            (&["private:*"], "team:a", false),
            (&["team:*"], "team:a", true),
            (&["team:*"], "teams:a", false),
            (&["team:a"], "team:a", true),
            (&["team:a"], "team:ab", false),
            (&["team:a"], "", false),
            (&["team:a"], "team:*", false),
            (&["team:*"], "team:*", true),
            (&["*"], "team:*", true),
            (&["*"], "private:*", false),
        ] {
            assert_eq!(named(names).cover(space), covered, "{names:?} {space}");
        }
    }

    #[test]
    fn a_name_that_means_nothing_is_refused() {
        for good in ["*", "team:*", "team:payments", "private:ann", "default"] {
            assert_eq!(Spaces::check(good), Ok(()), "{good}");
        }
        for bad in ["", "te*am", "tea*", "a b", "a b:*", "a\n"] {
            assert!(Spaces::check(bad).is_err(), "{bad}");
        }
    }
}
