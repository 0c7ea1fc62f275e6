//! `elfremap-check` on any bytes: an error or an answer, whatever the file says.
#![no_main]

use elfremap::hugepage::PageSize;
use elfremap::policy::Policy;
use elfremap_tools::check::{Analysis, document, render};
use elfremap_tools::output::Style;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(analysis) = Analysis::of(&bytes, &Policy::default(), PageSize::SIZE_2M) {
        let text = render(&analysis, None, Style::PLAIN);
        assert!(text.starts_with("suitable: ") || text.starts_with("not suitable: "));
        assert_eq!(text.starts_with("suitable: "), analysis.unfit().is_none());
        assert!(!text.contains('\u{1b}'));
        let _ = document(&analysis, None);
        let need = analysis.need();
        assert!(need.pool_pages.max <= need.pages.max && need.pages.min <= need.pages.max);
    }
});
