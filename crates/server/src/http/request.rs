//! What handlers need of a request: ids in the path, pages of a list, headers.

use axum::Json;
use axum::extract::Path;
use axum::extract::rejection::{JsonRejection, PathRejection};
use axum::http::{HeaderMap, HeaderValue};
use postrider::paging::Page;

use super::error::Refusal;

const MOST_OF_A_LIST: u32 = 1000;

pub type Body<T> = Result<Json<T>, JsonRejection>;
pub type Id = Result<Path<String>, PathRejection>;

pub fn id_of(path: Id) -> Result<i64, Refusal> {
    let text = path?.0;
    text.parse().map_err(|_| Refusal::invalid(format!("`{text}` is no id; ids are whole numbers")))
}

pub fn no(what: &str, id: i64) -> Refusal {
    Refusal::not_found(format!("there is no {what} {id}"))
}

pub fn page_of(limit: Option<u32>, cursor: Option<&String>) -> Result<(u32, Option<i64>), Refusal> {
    let limit = limit.unwrap_or(50);
    if !(1..=MOST_OF_A_LIST).contains(&limit) {
        return Err(Refusal::invalid(format!("limit must be from 1 to {MOST_OF_A_LIST}, not {limit}")));
    }
    let cursor = cursor.map(|text| text.parse::<i64>()).transpose();
    Ok((limit, cursor.map_err(|_| Refusal::invalid("cursor is not one of ours; take it from next_cursor"))?))
}

macro_rules! listing {
    ($name:ident, $item:ty) => {
        #[derive(serde::Serialize, utoipa::ToSchema)]
        pub struct $name {
            items: Vec<$item>,
            /// Where the next page begins; null at the end.
            next_cursor: Option<String>,
        }
    };
}
pub(super) use listing;

/// Pages asked for, for one page of what somebody sees.
const MOST_PAGES: usize = 20;

/// A page of what somebody sees of a list. What they do not see is passed over; where there is much of it, the page ends
/// early and says where to go on.
pub async fn seen<T, Asked>(
    place: (Option<i64>, u32),
    list: impl Fn(Option<i64>, u32) -> Asked,
    sees: impl Fn(&T) -> bool,
) -> Result<Page<T>, Refusal>
where
    Asked: Future<Output = postrider::Result<Page<T>>>,
{
    seen_of_any_size(place, u32::MAX, list, sees, |_| 0).await
}

/// Bytes of one page whose rows may be large.
const MOST_BYTES: usize = 4 << 20;

/// The same of a list whose rows may be large: they are read a few at a time, and the page ends when it is.
pub async fn seen_of_any_size<T, Asked>(
    (mut before, limit): (Option<i64>, u32),
    at_a_time: u32,
    list: impl Fn(Option<i64>, u32) -> Asked,
    sees: impl Fn(&T) -> bool,
    bytes: impl Fn(&T) -> usize,
) -> Result<Page<T>, Refusal>
where
    Asked: Future<Output = postrider::Result<Page<T>>>,
{
    let mut items = Vec::new();
    let mut size = 0;
    for _ in 0..MOST_PAGES.max(limit.div_ceil(at_a_time) as usize) {
        let left = limit - items.len() as u32;
        let page = list(before, left.min(at_a_time)).await?;
        let found = page.items.into_iter().filter(&sees);
        items.extend(found.inspect(|item| size += bytes(item)));
        before = page.next;
        if before.is_none() || items.len() as u32 >= limit || size >= MOST_BYTES {
            break;
        }
    }
    Ok(Page { items, next: before })
}

pub fn cursor(next: Option<i64>) -> Option<String> {
    next.map(|id| id.to_string())
}

/// The one value of a header; who sends two means one of them, and nobody can tell which.
pub fn header<'a>(headers: &'a HeaderMap, name: &str) -> Result<Option<&'a str>, Refusal> {
    let mut values = headers.get_all(name).iter();
    let Some(first) = values.next() else { return Ok(None) };
    if values.any(|other| other != first) {
        return Err(Refusal::invalid(format!("the header {name} came with different values; send one")));
    }
    text(name, first).map(Some)
}

/// The first value of a header that may come in parts.
pub fn first<'a>(headers: &'a HeaderMap, name: &str) -> Result<Option<&'a str>, Refusal> {
    headers.get(name).map(|value| text(name, value)).transpose()
}

fn text<'a>(name: &str, value: &'a HeaderValue) -> Result<&'a str, Refusal> {
    let text = std::str::from_utf8(value.as_bytes()).ok().filter(|text| !text.chars().any(char::is_control));
    text.ok_or_else(|| Refusal::invalid(format!("the header {name} is no text")))
}

/// A key in the quoted form of the IETF draft is the same key.
pub fn unquoted(key: &str) -> &str {
    key.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')).unwrap_or(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_page_of_large_rows_ends_early_and_goes_on_from_there() {
        let list = async |before: Option<i64>, limit: u32| {
            let from = before.unwrap_or(100);
            let items: Vec<i64> = (0..i64::from(limit)).map(|n| from - 1 - n).filter(|id| *id > 0).collect();
            let next = items.last().copied().filter(|id| *id > 1);
            Ok(Page { items, next })
        };
        let page = |before| seen_of_any_size((before, 1000), 2, list, |id: &i64| id % 2 == 0, |_| MOST_BYTES / 3 + 1);
        let first = page(None).await.unwrap();
        assert_eq!((first.items, first.next), (vec![98, 96, 94], Some(94)));
        assert_eq!(page(Some(94)).await.unwrap().items, [92, 90, 88]);
        let small = seen((None, 5), list, |_: &i64| true).await.unwrap();
        assert_eq!((small.items, small.next), (vec![99, 98, 97, 96, 95], Some(95)));
    }
}
